"""lowtri mask: what a mask shows and hides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtri.cli.options import Json, note, output_file, print_json

_MOST = 10_000_000  # positions: beyond it the counting takes minutes
_MOST_CELLS = 64  # positions each way up to which --json holds the table


def command(
    text: Annotated[str, typer.Argument(metavar="MASK", help='Who may see whom, as text: "causal & window(64)", ...')],
    n: Annotated[
        int | None, typer.Option("--n", min=1, max=_MOST, help="How many positions; else as many as show the mask.")
    ] = None,
    queries: Annotated[
        int | None, typer.Option("--queries", min=1, max=_MOST, help="Only the last so many positions ask.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="TEXT", help="Labels; they give --n as well.")
    ] = None,
    beside: Annotated[str | None, typer.Option("--beside", metavar="MASK", help="A second mask, to compare.")] = None,
    ticks: Annotated[bool, typer.Option("--ticks", help="A table of ticks and crosses.")] = False,
    numbers: Annotated[bool, typer.Option("--numbers", help="The matrix added to the scores: 0 and -inf.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="That matrix for LaTeX.")] = False,
    batch: Annotated[
        int | None, typer.Option("--batch", min=0, help="Only this batch row, where the mask differs by row.")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", min=0, help="Only this head, where the mask differs by head.")
    ] = None,
    svg: Annotated[
        Path | None,
        output_file(
            "The picture as .svg, .html, .png or .pdf.", ".svg", ".html", ".png", ".pdf", names=("--svg", "--out")
        ),
    ] = None,
    json: Json = False,
) -> None:
    """lowtri mask "causal & (window(3) | first(1))"
    lowtri mask causal --beside full --tokens "The black cat <end>" --ticks --svg mask.svg

    What a mask shows and hides: the picture, how many pairs are visible, and whether the future stays hidden.

    Masks are causal, full, window(n), band(before, after), first(n), documents(lengths=[...]), chunks(n), strided(n),
    keys(lengths=[...]) and heads([...]), joined by & | ~ - and parentheses. Beyond 64 positions a cell of the picture
    is a square of positions: full block visible, shaded partly, dot hidden. --tokens are cut at spaces, and by characters
    where their script has none (Thai, Chinese, Japanese).
    """
    from lowtri.errors import DataError
    from lowtri.masks import mask
    from lowtri.masks.picture import picture_size
    from lowtri.pictures.grids import MAX_CELLS
    from lowtri.pictures.labels import split

    labels, cut = (None, "") if tokens is None else split(tokens)
    if labels == []:
        raise DataError('mask: --tokens is empty. Fix: --tokens "The black cat".')
    texts = [text] if beside is None else [text, beside]
    masks = [_select(mask(text), batch, head) for text in texts]
    if labels is not None:
        n = len(labels)
    elif n is None:
        n = max(min(picture_size(*masks)[1], MAX_CELLS if ticks or numbers or latex else _MOST), queries or 0)
    nq = n if queries is None else queries
    if nq > n:
        raise DataError(f"mask: --queries is {nq}, but there are {n} positions. Fix: at most {n}.")
    picture: dict[str, Any] = {"beside": masks[1] if beside is not None else None, "tokens": labels}
    unlabelled = {**picture, "tokens": None} if latex else picture
    drawn = masks[0].draw(nq, n, ticks=ticks, numbers=numbers, latex=latex, **unlabelled)
    if labels is not None and cut != "cut at spaces":
        note(f"{len(labels)} tokens, {cut}")
    facts = [_facts(each, nq, n) for each in masks]
    if svg is not None:
        masks[0].save(svg, nq, n, **picture)
        note(f"wrote {svg}")
    if json:
        print_json({**facts[0], "beside": facts[1]} if beside is not None else facts[0])
        return
    remark = "% " if latex else ""  # a comment in LaTeX, so that the whole output can be pasted
    if beside is None:
        print(f"{remark}{masks[0]!r}")
    print(drawn, end="\n\n")
    for shown in facts:
        name = f"{shown['mask']}: " if beside is not None else ""
        causal = "causal" if shown["causal"] else "not causal: somebody sees a later position"
        print(f"{remark}{name}{_count(shown)}; {causal}")


def _select(mask: Any, batch: int | None, head: int | None) -> Any:
    """The mask of one batch row or head, where one is given; the other dimension keeps its length."""
    from lowtri.errors import DataError
    from lowtri.masks import heads

    if batch is None and head is None:
        return mask
    rows, columns = (*mask.batch, 1, 1)[:2]
    if head is None and columns > 1:
        return heads([mask.at(batch, h) for h in range(columns)])
    if batch is None and rows > 1:
        raise DataError(f"mask: --head {head} of a mask with {rows} batch rows. Fix: say --batch as well.")
    return mask.at(batch or 0, head or 0)


def _facts(mask: Any, nq: int, n: int) -> dict[str, Any]:
    import numpy as np

    pairs = np.asarray(mask.pairs(nq, n))
    facts = {
        "mask": repr(mask),
        "queries": nq,
        "keys": n,
        "batch": list(mask.batch),
        "pairs": pairs.tolist(),
        "share": (pairs / (nq * n)).tolist(),
        "causal": mask.is_causal(n),
    }
    if n <= _MOST_CELLS:
        facts["table"] = mask.dense(nq, n).astype(int).tolist()
    return facts


def _count(facts: dict[str, Any]) -> str:
    """How many pairs are visible, in words."""
    import numpy as np

    of = facts["queries"] * facts["keys"]
    if not facts["batch"]:
        return f"{facts['pairs']:,} of {of:,} pairs visible ({facts['share']:.1%})"
    counts = np.asarray(facts["pairs"])
    return f"{counts.min():,} to {counts.max():,} of {of:,} pairs visible, by batch row and head"
