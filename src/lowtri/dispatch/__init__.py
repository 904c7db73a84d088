"""From the user's arguments to a backend: check, choose by rules, prepare, cache the prepared call, run.

attend            attention() and which_engine()
prepared          a call in eager mode: its signature, the cache of prepared calls, autocast
autograd          gradients of prepared calls
backward          attention_backward(): gradients from a known output and log-sum-exp
choose            which backend runs a call
programs          attention() under torch.compile and torch.export: two operators
merge             merges results over disjoint sets of keys
sdpa_compatible   torch's scaled_dot_product_attention, with torch's meanings
"""
