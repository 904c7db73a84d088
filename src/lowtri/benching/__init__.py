"""How fast attention is on this machine, compared with other implementations and with the machine's limits.

machine   facts about the machine: CPU, caches, versions, load
ceilings  the maximum rates of this CPU for multiplication and for reading
cases     the table of cases
peers     the implementations of one case: lowtri's, torch's, the plain formula
measure   timing in turns, in one process; medians
show      table, JSON
growth    time and memory against length, for `lowtri bench --plot`
growth_picture  draws them
grid      the calls of `lowtri bench --never-slower`
never_slower  times them against torch, and lists those that are slower
checkup   the report of `lowtri doctor`
"""
