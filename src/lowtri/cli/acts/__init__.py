"""The acts of `lowtri demo`, in the order in which they are played. One file an act, with TITLE, SENTENCE and `play`.

stage      what an act is given, and what it gives: text, promises, files
tables     the two pairs that are easily confused, as tables
steps      every step of attention, with the figures that notebooks show
who        who sees whom: everybody, and the triangle
roads      one answer, however it is computed
why        the same model trained with the mask and without it
writing    both models write, and what a cache holds
peeking    the audit: who peeks, where, and through which module
switched   a transformers model switched over: equal, and audited
glassllm   weights that others trained write in our decoder
speed      beside torch's own attention, on this machine
page       index.html, with everything
"""

ACTS = ("steps", "who", "roads", "why", "writing", "peeking", "switched", "glassllm", "speed")
