"""Every step of attention, with numbers.

steps        explain(): from q, k, v and a mask to scores, weights and output, with and without the mask
capture      what a module computes before attention: encodings, projections, q, k, v
explanation  the result of explain(): the steps, as JSON, as one HTML page, and as one picture
tables       the steps as data, and as tables of text
example      inputs for explain() without a trained model: the worked example, or random weights
"""
