"""Who sees whom: the encoder's full square beside the decoder's triangle, with the tokens."""

from __future__ import annotations

import numpy as np

import lowtri
from demo.context import Context, Result

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Who sees whom"
SENTENCE = "On the left everybody sees everybody, as in an encoder; on the right each token sees what came before it."

_SENTENCES = ("The black cat <end>", "I love Machine Learning", "I love NLP")
_OTHERS = ("causal & window(4)", "causal | first(4)", "causal & (window(4) | first(1))", "causal & chunks(4)")
_DOCUMENTS = "causal & documents(lengths=[5, 9, 4])"


def run(context: Context) -> Result:
    """Draw the sentences' tables and some other masks, and read the pictures again."""
    result, blocks = Result(""), []
    for number, sentence in enumerate(_SENTENCES, start=1):
        tokens = sentence.split()
        n = len(tokens)
        blocks.append(lowtri.full().draw(n, beside=lowtri.causal(), tokens=tokens, ticks=True))
        name = f"who-{number}.svg"
        lowtri.full().save(context.out / name, n, beside=lowtri.causal(), tokens=tokens)
        result.pictures.append(name)
        drawn = [line.split()[1:] for line in lowtri.causal().draw(n, tokens=tokens, ticks=True).splitlines()[1:]]
        result.check(
            f"“{sentence}”: token i is seen by i and all after it, {lowtri.causal().pairs(n)} of {n * n} pairs",
            drawn == [["✓"] * (q + 1) + ["✗"] * (n - q - 1) for q in range(n)],
        )
    blocks.append("The same question in other words:")
    for text in (*_OTHERS, _DOCUMENTS):
        blocks.append(str(lowtri.mask(text)))  # as many positions as show the mask
    read = [lowtri.mask(repr(lowtri.mask(text))) == lowtri.mask(text) for text in _OTHERS]
    result.check(
        "a picture is as large as what it shows: 18 positions of three documents", len(blocks[-1].splitlines()) == 19
    )
    result.check("a mask and its text are one: each is read back as it was", all(read))
    x, error = np.eye(8), ""
    try:
        lowtri.attention(x, x, x, "causal & documents(lengths=[3, 9])")
    except lowtri.MaskError as raised:
        error = str(raised).splitlines()[0]
    result.check(f"lengths that do not fit the row raise: {error}", "add up to 12" in error)
    result.text = "\n\n".join(blocks)
    return result
