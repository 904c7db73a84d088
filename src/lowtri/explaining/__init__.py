"""Every step of attention, with numbers.

steps        explain(): from q, k, v and a mask to scores, weights and output, with and without the mask
capture      what a module computes on the way into attention: encodings, maps, q, k, v
explanation  what explain() returns: the steps, as text, JSON and HTML
step         the steps as data
show         the steps as tables of text
html         the steps as one page
example      what to explain without a trained model: the worked example, or random weights
"""
