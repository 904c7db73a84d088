"""How fast attention is on this machine, compared with other implementations and with the machine's limits.

machine   what the machine is: CPU, caches, versions, load
ceilings  the fastest that this CPU multiplies and reads
cases     the table of cases
peers     the ways to compute one case: ours, torch's, the plain formula
measure   in turns, in one process, medians
show      table, JSON, picture
checkup   what `lowtri doctor` says
"""
