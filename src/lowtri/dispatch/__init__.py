"""From the user's arguments to a backend: check once, choose by cost, prepare, keep what was prepared, run.

attend            attention() and which_engine()
signature         everything about a call but where its numbers lie: the key of prepared calls
prepared          the one cache of prepared calls
choose            which backend runs a call
programs          attention() in a program that torch.compile or torch.export writes down
merge             attention over disjoint keys, joined
sdpa_compatible   torch's scaled_dot_product_attention, with torch's meanings
"""
