"""From the user's arguments to a backend: check, choose by rules, prepare, cache the prepared call, run.

attend            attention(), which_engine() and merge()
signature         the key under which a prepared call is kept
prepared          a call in eager mode: the cache of prepared calls, autocast
autograd          gradients of prepared calls
choose            which backend runs a call
operators         attention() under torch.compile and torch.export: two operators; attention_backward()
sdpa_compatible   torch's scaled_dot_product_attention, with torch's meanings
"""
