"""How fast attention is on this machine, compared with other implementations and with the machine's limits.

machine   facts about the machine: CPU, caches, versions, load
ceilings  the maximum rates of this CPU for multiplication and for reading
cases     one call of attention, and three presets of them
peers     the implementations of one case: lowtri's, torch's, the plain formula
timing    the timer: turns in one process, tensors, threads, the peak of memory
table     `lowtri bench`: a table of medians and ceilings
growth    `lowtri bench --plot`: time and memory against length
never_slower  `lowtri bench --never-slower`: a grid of calls by turns with torch
checkup   `lowtri doctor`
"""
