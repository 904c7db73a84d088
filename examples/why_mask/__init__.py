"""Why the mask? The same small model trained with and without it, and the consequences. Run it: python examples/why_mask

experiment    trains both models and measures them
modes         the same positions computed in parallel, with a cache, and from the recomputed prefix
words         how many words and word pairs of a text the training text has
consequences  the measurements as text and as a picture
"""
