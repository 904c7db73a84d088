import torch, lowtri

torch.manual_seed(0)
for cell in ("rnn", "lstm"):
    model = lowtri.nn.RecurrentLM(cell=cell, vocab_size=20, hidden_size=64)
    print(cell, list(lowtri.generate(model, [1], max_new_tokens=4)))
