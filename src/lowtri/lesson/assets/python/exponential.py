import lowtri

print(lowtri.causal().draw(4, numbers=True))
print(lowtri.explain(scores=[[0.0, 2.0], [0.0, -10.0]], mask="full")["weights"].value)
