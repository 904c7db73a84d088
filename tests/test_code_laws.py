"""The shape of functions, statements and files: a statement says one thing, a function takes few parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAX_LINES = 600  # of a file: a file is a subject, not a fragment of one
MAX_PARAMETERS = 8  # of a function
MAX_TARGETS = 3  # of an assignment

MANY_PARAMETERS = {
    # Public functions: each parameter is a user's.
    "src/lowtri/auditing/audit.py:audit",
    "src/lowtri/dispatch/attend.py:attention",
    "src/lowtri/dispatch/attend.py:which_engine",
    "src/lowtri/dispatch/backward.py:attention_backward",
    "src/lowtri/explaining/steps.py:explain",
    "src/lowtri/generation/cache.py:KVCache.attend",
    "src/lowtri/generation/generate.py:generate",
    "src/lowtri/pictures/masks.py:draw",
    "src/lowtri/parallel/context.py:ContextParallel.attention",
    "src/lowtri/verifying/verify.py:verify",
    # Commands: each parameter is an option.
    "src/lowtri/cli/checks.py:audit",
    "src/lowtri/cli/checks.py:verify",
    "src/lowtri/cli/learn.py:explain",
    "src/lowtri/cli/learn.py:mask",
    "src/lowtri/cli/models.py:generate",
    # Helpers of tests: the sizes of a call, and a function with the parameters of lowtri.attention.
    "tests/support/attention_cases.py:draw",
    "tests/support/attention_cases.py:pair_by_pair",
    # The definition: each parameter is a term of the formula.
    "src/lowtri/backends/reference.py:attend",
    # Copies of another library's signature.
    "src/lowtri/integrations/flash_attn/functions.py:flash_attn_func",
    "src/lowtri/integrations/flash_attn/functions.py:flash_attn_varlen_func",
    "src/lowtri/integrations/flash_attn/functions.py:flash_attn_with_kvcache",
    "src/lowtri/integrations/flex/attention.py:flex_attention",
    "src/lowtri/integrations/flex/masks.py:create_block_mask",
    "src/lowtri/integrations/transformers/attention.py:attend",
    "src/lowtri/integrations/transformers/masks.py:make_mask",
    "src/lowtri/integrations/transformers/switching.py:_FalconAttention.forward",
    "src/lowtri/nn/attention.py:MultiHeadAttention.__init__",
    "src/lowtri/nn/attention.py:MultiHeadAttention.forward",
}


class Fault(NamedTuple):
    file: str  # from the root of the repository
    line: int
    law: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.law}"


class Function(NamedTuple):
    name: str  # with its file, its class and the function around it: src/lowtri/masks/mask.py:Mask.draw
    parameters: int


@cache
def files() -> dict[str, str]:
    """The text of every file that the laws are for."""
    folders = ["src/lowtri", "benchmarks", "tools", "tests/support"]
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def trees() -> dict[str, ast.Module]:
    return {file: ast.parse(text) for file, text in files().items()}


@cache
def functions() -> list[tuple[str, Function]]:
    """Each function with its file."""
    return [(file, function) for file, tree in trees().items() for function in functions_of(tree, f"{file}:")]


def functions_of(tree: ast.AST, prefix: str) -> Iterator[Function]:
    """All functions, also those inside others and lambdas; ``self`` and ``cls`` are not counted."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            name += getattr(node, "name", "lambda")
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            rest = [parameter for parameter in (node.args.vararg, node.args.kwarg) if parameter is not None]
            is_method = bool(named) and named[0].arg in ("self", "cls")
            yield Function(name, len(named) + len(rest) - is_method)
            name += "."
        elif isinstance(node, ast.ClassDef):
            name += f"{node.name}."
        yield from functions_of(node, name)


def faults_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the law of each statement and expression that says more than one thing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((node.lineno, law) for law in assignment_laws(node))
        elif isinstance(node, ast.IfExp):
            inner = (child for part in ast.iter_child_nodes(node) for child in ast.walk(part))
            if any(isinstance(child, ast.IfExp) for child in inner):
                yield node.lineno, "a conditional expression inside another"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if any(is_sequence(a) and is_condition(b) for a, b in ((node.left, node.right), (node.right, node.left))):
                yield node.lineno, "a sequence times a condition"
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno, "an item of a literal sequence"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.BoolOp | ast.IfExp):
            yield node.lineno, "an expression of conditions as a statement"


def assignment_laws(node: ast.Assign) -> Iterator[str]:
    for target in node.targets:
        count = len(names_in(target))
        if count > MAX_TARGETS:
            yield f"an assignment of {count} values"
        elif count == MAX_TARGETS and isinstance(node.value, ast.Tuple):
            yield "three assignments in one"


def names_in(target: ast.expr) -> list[ast.expr]:
    """What a target assigns to, also inside of others; ``_`` is not counted."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for part in target.elts for name in names_in(part)]
    if isinstance(target, ast.Starred):
        return names_in(target.value)
    return [] if isinstance(target, ast.Name) and target.id == "_" else [target]


def is_sequence(node: ast.expr) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.List | ast.Tuple | ast.JoinedStr)


def is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "isinstance", "hasattr", "callable")
    return isinstance(node, ast.Compare | ast.BoolOp)


def test_statements_say_one_thing() -> None:
    faults = [Fault(file, line, law) for file, tree in trees().items() for line, law in faults_of(tree)]
    assert [str(fault) for fault in faults] == []


def test_functions_have_few_parameters() -> None:
    many = set()
    for _, function in functions():
        if function.parameters > MAX_PARAMETERS and function.name not in MANY_PARAMETERS:
            many.add(f"{function.name} has {function.parameters}")
    assert many == set()


def test_exceptions_are_needed() -> None:
    """A name leaves MANY_PARAMETERS with its function."""
    assert {function.name for _, function in functions() if function.parameters > MAX_PARAMETERS} >= MANY_PARAMETERS


def test_files_are_short() -> None:
    lines = {file: len(text.splitlines()) for file, text in files().items()}
    assert {file: count for file, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("law", "wrong", "right"),
    [
        ("an assignment of 4 values", "a, b, c, d = array.shape", "a, b, c = array.shape"),
        ("an assignment of 4 values", "a, *b, c, d = call()", "a, *b = call()"),
        ("an assignment of 4 values", "(a, b), (c, d) = x, y", "_, a, b, _ = array.shape"),
        ("three assignments in one", "a, b, c = 1, 2, 3", "a, b = b, a"),
        ("three assignments in one", "x = a, b, c = 1, 2, 3", "a = b = c = 1"),
        ("a conditional expression inside another", "x = 1 if a else 2 if b else 3", "x = 1 if a else 2"),
        ("a conditional expression inside another", "x = f(1 if a else 2) if b else 3", "x = [1 if a else 2]"),
        ("a sequence times a condition", "x = [1] * (n > 1)", "x = [1] * n"),
        ("a sequence times a condition", "x = (not n) * 's'", "x = (n > 1) * y"),
        ("a sequence times a condition", "x = f'{n}' * bool(n)", "x = '-' * len(n)"),
        ("an item of a literal sequence", "x = (1, 2)[n]", "x = {True: 1, False: 2}[n]"),
        ("an expression of conditions as a statement", "a and b()", "a = b and c"),
        ("an expression of conditions as a statement", "b() if a else c()", "if a: b()"),
    ],
)
def test_each_law_is_checked(law: str, wrong: str, right: str) -> None:
    assert [found for _, found in faults_of(ast.parse(wrong))] == [law]
    assert list(faults_of(ast.parse(right))) == []


def test_parameters_are_counted() -> None:
    code = "class A:\n def f(self, a, /, b, *c, d, **e):\n  return lambda x: x\nasync def g(cls): pass"
    found = {function.name: function.parameters for function in functions_of(ast.parse(code), "")}
    assert found == {"A.f": 5, "A.f.lambda": 1, "g": 0}
