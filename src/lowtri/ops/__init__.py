"""The checked description of an attention call.

arguments      checks the arguments of a call and describes it
call           the checked, frozen description of a call: shapes, positions, mask, options
dropout        which weights are dropped: a function of the seed, the row, the head and the positions
distance_bias  biases of one number for each distance between query and key
tensors        which tensors kernels may read; batched gradients
"""
