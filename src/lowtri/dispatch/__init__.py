"""From the user's arguments to a backend: check, choose by rules, prepare, cache the prepared call, run.

attend            attention(), which_engine() and merge()
signature         the key under which a prepared call is kept
prepared          a call in eager mode: the cache of prepared calls, autocast
autograd          gradients of prepared calls
backward          attention_backward(): gradients from a known output and log-sum-exp
choose            which backend runs a call
operators         attention() under torch.compile and torch.export: operators of the graph
exported          a call in torch's own operations, for torch.onnx.export
jagged            jagged nested tensors as one row of documents
dense_tables      tables of bools or numbers of other libraries, read as masks
sdpa_compatible   torch's scaled_dot_product_attention, with torch's meanings
"""
