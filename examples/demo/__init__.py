"""The demo: every part of lowtri in one run, each with its checks and its files. Run it with `make demo`.

run        the command: runs the parts, prints them, writes the page
context    what a part is given, and what it returns: text, checks, files
page       index.html, with everything
tables     two comparisons as tables: training with inference, masked self-attention with an autoregressive model

The parts, in their order; one file each, with TITLE, SENTENCE and `run`:

steps      every step of attention, with the figures that notebooks show
who        who sees whom: the encoder's full table and the decoder's triangle
paths      the same attention by every way to compute it
why        the same model trained with the mask and without it
writing    both models generate text, and what a cache holds
peeking    the audit: which models leak, where, and through which module
native     the first call of a fresh process, without a compiler
kernels    attention kernels held to the definition, their mistakes by name
switched   a transformers model switched to lowtri: equal logits, and audited
glassllm   pretrained weights of another project in lowtri's Decoder
spread     one row of tokens over four processes
speed      against torch's own attention, on this machine
lesson     the interactive lesson in four languages
"""

PARTS = (
    "steps",
    "who",
    "paths",
    "why",
    "writing",
    "peeking",
    "native",
    "kernels",
    "switched",
    "glassllm",
    "spread",
    "speed",
    "lesson",
)
