"""One idea has one word: names that were replaced by the field's are not defined again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Where (a path, or the beginning of one): the name that is not defined there, and the word for what it meant.
REPLACED = {
    "": {
        "CacheTile": "DecodeShape",
        "GRAIN": "WORK_PER_THREAD",
        "PORTION": "L1_VALUE_BYTES",
        "Positions": "Placement, or Index",
        "Replaced": "SwappedForward",
        "System": "ModelUnderTest",
        "Trial": "Probe, or Comparison",
        "Watch": "DivergingRuns",
        "Way": "what it is: Matmul, Decoding, layout",
        "all_tokens": "no_padding",
        "between_tokens": "visible_unchecked",
        "check_row_lengths": "check_packed_totals",
        "checkup": "doctor",
        "doubtful": "unconfirmed",
        "edge_queries": "cut_granularity",
        "has_tiles": "has_amx",
        "is_even_first": "loads_even_then_odd",
        "is_selective": "checks_values",
        "made_mask": "mask_was_built",
        "on_tiles": "uses_amx",
        "opaque": "why_unreadable",
        "packed_bias": "bias_arguments",
        "packed_keys": "key_operand",
        "pairs_tile": "bf16_register_block",
        "pristine": "fresh_copy",
        "remake": "materialize",
        "row_lengths": "packed_totals",
        "stretches": "run_bounds",
        "unit_queries": "queries_per_step",
        "_Once": "UnpackedOnce",
        "_descend": "_subdivide",
        "_in_four": "to_4d",
        "_without_holes": "clear_padding",
    },
}


def definitions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the name of each function, class, parameter, variable and attribute that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def replaced_names(path: Path) -> list[str]:
    """The names of the table that a file defines, each with its line and the word that replaces it."""
    relative = path.relative_to(ROOT).as_posix()
    words: dict[str, str] = {}
    for place, names in REPLACED.items():
        if relative.startswith(place):
            words |= names
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [f"{relative}:{line}: {name} -> {words[name]}" for line, name in definitions(tree) if name in words]


FILES = sorted(path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))


def test_replaced_names_are_not_defined_again() -> None:
    assert [line for path in FILES for line in replaced_names(path)] == []


@pytest.mark.parametrize("text", ["def opaque(): pass", "opaque = 1", "x.opaque = 1", "def f(opaque): pass"])
def test_a_definition_of_a_replaced_name_is_seen(text: str) -> None:
    assert "opaque" in [name for _, name in definitions(ast.parse(text))]
