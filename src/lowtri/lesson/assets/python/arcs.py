import lowtri

print(lowtri.causal().draw(4, tokens="The black cat <end>", ticks=True))
