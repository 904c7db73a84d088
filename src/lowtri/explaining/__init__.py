"""Every step of attention, with numbers.

steps        explain(): from q, k, v and a mask to scores, weights and output, with and without the mask
capture      what a module computes before attention: encodings, projections, q, k, v
projections  the three linear maps of an attention module, whatever their names
models       what the attention of one layer of a transformers model receives
calling      calls of a user's module, and its own output under a mask
agreement    whether the steps are what the module itself computes
explanation  the result of explain(): the steps as data, as tables of text, as JSON, as one HTML page, and as one picture
example      inputs for explain() without a trained model: the worked example, or random weights
"""
