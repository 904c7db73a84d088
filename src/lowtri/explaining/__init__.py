"""Every step of attention, with numbers.

steps        explain(): from q, k, v and a mask to scores, weights and output, with and without the mask
capture      what a module computes before attention: encodings, projections, q, k, v
explanation  the result of explain(): the steps as data, as tables of text, as JSON, as one HTML page, and as one picture
example      inputs for explain() without a trained model: the worked example, or random weights
"""
