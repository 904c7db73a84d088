"""lowtri explain, lowtri mask and lowtri lesson: attention as numbers, masks as pictures, and the interactive page."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from lowtri.cli.options import (
    Json,
    Threads,
    load_model,
    note,
    option,
    output_file,
    print_result,
    refuse,
    text_or_stdin,
    use_threads,
)

if TYPE_CHECKING:
    from lowtri.explaining.explanation import Explanation

_MOST = 10_000_000  # positions of a mask: beyond it the counting takes minutes
_SEED = 42  # of random weights
_MOST_CELLS = 64  # positions each way up to which --json holds the table


class Language(str, Enum):
    """The languages of the lesson and of explain."""

    en = "en"
    id = "id"
    th = "th"
    zh = "zh"


def explain(
    sentence: Annotated[
        str | None, typer.Argument(metavar="SENTENCE", help="The sentence to look at.", show_default="Write a poem")
    ] = None,
    mask: Annotated[
        str | None, option("Who may see whom.", metavar="TEXT", show_default="causal, or the model's")
    ] = None,
    heads: Annotated[int | None, option("How many heads, without a model.", min=1, max=64, show_default="1")] = None,
    model: Annotated[
        str | None,
        option(
            "A trained model, instead of random weights: a folder, a GGUF file, org/name in the hub's cache, smollm2.",
            metavar="MODEL",
        ),
    ] = None,
    layer: Annotated[int | None, option("Which layer of the model.", min=0, show_default="0")] = None,
    head: Annotated[int | None, option("Which head.", min=0, show_default="all; 0 of a model")] = None,
    encodings: Annotated[
        Path | None, option("Numbers for each token: .json, .npy, or a table as text.", metavar="FILE")
    ] = None,
    scores: Annotated[
        Path | None, option("Given scores, queries by keys: mask and softmax alone.", metavar="FILE")
    ] = None,
    values: Annotated[Path | None, option("With --scores: a row for each key.", metavar="FILE")] = None,
    html: Annotated[
        Path | None,
        output_file(
            "Write all steps there, too: a page as .html, or .json, .txt, .svg, .png, .pdf.",
            *(".html", ".json", ".txt", ".svg", ".png", ".pdf"),
            names=("--html", "--out"),
        ),
    ] = None,
    seed: Annotated[
        int | None, option("Draws the random weights.", min=0, max=2**63 - 1, show_default=str(_SEED))
    ] = None,
    lang: Annotated[Language, option("The language of the sentences.")] = Language.en,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """lowtri explain "Write a poem"
    lowtri explain "The black cat" --mask "causal & window(2)" --html steps.html

    Every step of masked attention, with numbers: tokens, encodings, W_q^T, q, k, v, scores, scaled, masked, weights and
    output, with and without the mask. With a model they are those of one head in one layer, from the q, k and v that its attention
    receives. Without a model the weights are random, and the result says so. A sentence is cut at
    spaces, and by characters where its script has none; with a model, by its tokenizer. A file of numbers is .json, .npy,
    or text as a table or as Python or NumPy print an array.
    """
    from lowtri.explaining.example import SENTENCE, tokens_of, untrained
    from lowtri.explaining.explanation import as_text
    from lowtri.explaining.steps import explain as steps_of

    use_threads(threads)
    if values is not None and scores is None:
        _reject("--values goes with --scores", "add --scores FILE")
    if layer is not None and model is None:
        _reject("--layer is for a trained model", "add --model MODEL")
    without: dict[str, Any] = {"--model": model, "--encodings": encodings, "--heads": heads, "--seed": seed}
    sentence = None if sentence is None else text_or_stdin(sentence, "the sentence")
    mask = None if mask is None else text_or_stdin(mask, "the mask")
    if scores is not None:
        refuse("--scores", "does not go with given scores", without)
        table, rows = _read(scores, most=3), None if values is None else _read(values, most=3)
        tokens = None if sentence is None else tokens_of(sentence)[0]
        explanation = steps_of(
            scores=table, values=rows, tokens=tokens, mask=mask or "causal", head=head, lang=lang.value
        )
    elif model is not None:
        refuse("--model", "is for random weights; a model has its own", without | {"--model": None})
        explanation = _of_model(model, SENTENCE if sentence is None else sentence, mask, layer or 0, head, lang.value)
    else:
        text, numbers = SENTENCE if sentence is None else sentence, None if encodings is None else _read(encodings)
        explanation = untrained(
            text,
            mask or "causal",
            encodings=numbers,
            seed=_SEED if seed is None else seed,
            heads=heads or 1,
            head=head,
            lang=lang.value,
        )
    if html is not None:
        note(f"wrote {explanation.save(html)}")
    width = shutil.get_terminal_size((100, 24)).columns
    colours = sys.stdout.isatty()
    shown = "" if json else as_text(explanation, width=width, colour=colours)
    print_result(explanation.as_dict() if json else None, shown, json, colours=colours)


def _of_model(name: str, sentence: str, mask: str | None, layer: int, head: int | None, lang: str) -> Explanation:
    from lowtri.explaining.steps import explain as steps_of
    from lowtri.generation.generate import encode

    model, tokenizer, _ = load_model(name, mask=mask)
    ids = encode(tokenizer, sentence)
    if not ids:
        _reject("the sentence is empty", 'a word at least, as in "Write a poem"')
    tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    explanation = steps_of(model, ids, tokens=tokens, layer=layer, head=head, lang=lang)
    return replace(explanation, note=f"Tokens by the model's tokenizer. {explanation.note}")


def _read(path: Path, most: int = 2) -> Any:
    """Numbers of 2 to ``most`` dimensions: NumPy's format, nested lists as JSON or NumPy print them, or a table as text."""
    import re
    from ast import literal_eval

    import numpy as np

    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=False)
        else:
            content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
            text = content.decode("utf-8")
            if "[" in text:  # NumPy prints no commas, and a long row on several lines
                nested = text[text.index("[") : text.rindex("]") + 1]
                rows = literal_eval(re.sub(r"(?<=[\d.\]])\s+(?=[-+\d.\[])", ", ", nested))
            else:
                rows = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
        numbers = np.asarray(rows, dtype=np.float64)
    except (ValueError, TypeError, EOFError, SyntaxError, RecursionError, MemoryError):
        _reject(f"{path} is no table of numbers", "a row for each token, all rows of equal length")
    if not numbers.size:
        _reject(f"{path} is empty", "a row of numbers for each token")
    if not 2 <= numbers.ndim <= most:
        expected = "(tokens, d_model)" if most == 2 else "(rows, columns) or (heads, rows, columns)"
        _reject(f"{path} has an array of the shape {numbers.shape}", f"an array of the shape {expected}")
    if not np.isfinite(numbers).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        _reject(f"{path}: the number at {where} is {numbers[where]}", "finite numbers; --mask hides pairs")
    return numbers


def _reject(what: str, fix: str) -> NoReturn:
    from lowtri.errors import DataError

    raise DataError(f"explain: {what}. Fix: {fix}.")


def mask(
    text: Annotated[str, typer.Argument(metavar="MASK", help='Who may see whom, as text: "causal & window(64)", ...')],
    n: Annotated[
        int | None, option("How many positions; else as many as show the mask.", "--n", min=1, max=_MOST)
    ] = None,
    queries: Annotated[int | None, option("Only the last so many positions ask.", min=1, max=_MOST)] = None,
    tokens: Annotated[str | None, option("Labels; they give --n as well.", metavar="TEXT")] = None,
    beside: Annotated[str | None, option("A second mask, to compare.", metavar="MASK")] = None,
    ticks: Annotated[bool, option("A table of ticks and crosses.", "--ticks")] = False,
    numbers: Annotated[bool, option("The matrix added to the scores: 0 and -inf.", "--numbers")] = False,
    latex: Annotated[bool, option("That matrix for LaTeX.", "--latex")] = False,
    batch: Annotated[int | None, option("Only this batch row, where the mask differs by row.", min=0)] = None,
    head: Annotated[int | None, option("Only this head, where the mask differs by head.", min=0)] = None,
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
    tree([...]), keys(lengths=[...]) and heads([...]), joined by & | ~ - and parentheses. Beyond 64 positions a cell of the picture
    is a square of positions: full block visible, shaded partly, dot hidden. --tokens are cut at spaces, and by characters
    where their script has none (Thai, Chinese, Japanese).
    """
    from lowtri.errors import DataError
    from lowtri.masks import mask as mask_of
    from lowtri.masks.label_masks import check_packed_totals
    from lowtri.pictures.grids import MAX_CELLS
    from lowtri.pictures.labels import split
    from lowtri.pictures.masks import picture_size

    drawings = {"--ticks": ticks, "--numbers": numbers, "--latex": latex}
    if json:
        refuse("--json", "is a form of the picture, which JSON does not hold", drawings)
    if tokens is not None:
        refuse("--tokens", "is the number of the tokens", {"--n": n})
        if latex and svg is None:
            refuse("--latex", "are labels, which the matrix does not have", {"--tokens": tokens})
    text = text_or_stdin(text, "the mask")
    beside = None if beside is None else text_or_stdin(beside, "the second mask")
    labels, cut = (None, "") if tokens is None else split(text_or_stdin(tokens, "--tokens"))
    if labels == []:
        raise DataError('mask: --tokens is empty. Fix: --tokens "The black cat".')
    texts = [text] if beside is None else [text, beside]
    masks = [_select(mask_of(text), batch, head) for text in texts]
    if labels is not None:
        n = len(labels)
    elif n is None:
        n = max(min(picture_size(*masks)[1], MAX_CELLS if ticks or numbers or latex else _MOST), queries or 0)
        n = min(n, *(total for each in masks for total in each.packed_totals), _MOST)
    for each in masks:  # a picture may show the beginning of a row, and nothing behind its end
        check_packed_totals("mask", each, n, complete=False)
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
    remark = "% " if latex else ""  # a comment in LaTeX, so that the whole output can be pasted
    lines = [f"{remark}{masks[0]!r}"] if beside is None else []
    lines += [drawn, ""]
    for shown in facts:
        name = f"{shown['mask']}: " if beside is not None else ""
        causal = "causal" if shown["causal"] else "not causal: some query sees a later position"
        lines.append(f"{remark}{name}{_count(shown)}; {causal}")
    print_result({**facts[0], "beside": facts[1]} if beside is not None else facts[0], "\n".join(lines), json)


def _select(mask: Any, batch: int | None, head: int | None) -> Any:
    """The mask of one batch row or head, where one is given; the other dimension keeps its length."""
    from lowtri.errors import DataError
    from lowtri.masks import heads

    if batch is None and head is None:
        return mask
    rows = mask.batch[0] if mask.batch else 1
    columns = mask.batch[1] if len(mask.batch) > 1 else 1
    if head is None and columns > 1:
        return heads([mask.for_row(batch, h) for h in range(columns)])
    if batch is None and rows > 1:
        raise DataError(f"mask: --head {head} of a mask with {rows} batch rows. Fix: say --batch as well.")
    return mask.for_row(batch or 0, head or 0)


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


def lesson(
    out: Annotated[Path, output_file("Where to write the page.", ".html")] = Path("lesson-en.html"),
    lang: Annotated[Language, option("The language of the page.")] = Language.en,
    threads: Threads = None,
) -> None:
    """lowtri lesson --out lesson-en.html
    lowtri lesson --out lesson-zh.html --lang zh

    Masked self-attention as one interactive page that works without network: every step with numbers, masks to draw, maps
    of trained models, traps, a quiz. The times in it are measured while it is made. The four pages link to one another
    when they are named lesson-en.html, lesson-id.html, lesson-th.html and lesson-zh.html.
    """
    from lowtri.lesson.page import write_lesson

    use_threads(threads)
    write_lesson(out, lang.value)
    note(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB)")
