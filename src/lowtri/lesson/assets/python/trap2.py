import lowtri

print(lowtri.mask("causal & window(4)").draw(6))
