"""Every step of attention, with numbers.

steps        explain(): from q, k, v and a mask to scores, weights and output, with and without the mask
capture      what a module computes before attention: encodings, projections, q, k, v
explanation  the result of explain(): the steps, as text, JSON and HTML
step         the steps as data
show         the steps as tables of text
equation     the steps as one picture, laid out as the equation reads
html         the steps as one page
example      inputs for explain() without a trained model: the worked example, or random weights
"""
