import torch, lowtri

torch.manual_seed(0)
model = lowtri.nn.Decoder(lowtri.nn.DecoderConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2))
ids = list(lowtri.generate(model, [1], max_new_tokens=4))
print(ids, model(torch.tensor([[1, *ids]])).argmax(-1))
