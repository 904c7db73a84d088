"""Private functions of other libraries are used in one package, and where a version lacks one, lowtri says so or does without."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowtri
from lowtri.compat import torch_private, transformers_private
from lowtri.compat.torch_private import recording_gradients
from lowtri.errors import EngineError
from lowtri.ops import tensors

SOURCE = Path(lowtri.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LIBRARIES = {"torch", "numba", "llvmlite", "transformers", "tokenizers", "safetensors", "numpy", "typer", "rich"}
UNDOCUMENTED = ("numba.core", "numba.np", "numba.cpython", "torch.utils._pytree")
# By Python: of named tuples, and os._exit.
DOCUMENTED = {"_asdict", "_exit", "_field_defaults", "_fields", "_make", "_replace"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node, ast.Name) or (isinstance(node.value, ast.Name) and node.value.id == "self")
            if of_self:
                yield node.id if isinstance(node, ast.Name) else node.attr


OUR_NAMES = {name for path in FILES for name in defined_names(ast.parse(path.read_text(encoding="utf-8")))}


def private_uses(source: str) -> list[str]:
    """The private names of other libraries in a source: imported, read, or named in getattr and hasattr."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if _uses_private_name(node)]


def _uses_private_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(_is_private_module(alias.name) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        names = any(is_private(alias.name) for alias in node.names)
        return _is_private_module(module) or (names and module.split(".")[0] in LIBRARIES)
    if isinstance(node, ast.Attribute):
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        of_library = isinstance(root, ast.Name) and root.id in LIBRARIES
        known = node.attr in OUR_NAMES and node.attr != "_version"
        return is_private(node.attr) and node.attr not in DOCUMENTED and (of_library or not known)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr", "setattr")
    ):
        name = node.args[1]
        return isinstance(name, ast.Constant) and is_private(name.value)
    return False


def _is_private_module(module: str) -> bool:
    top = module.split(".")[0]
    private = any(is_private(part) for part in module.split(".")) or f"{module}.".startswith(
        tuple(f"{name}." for name in UNDOCUMENTED)
    )
    return top in LIBRARIES and private


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(SOURCE).as_posix() for path in FILES])
def test_private_functions_of_libraries_are_used_in_compat_only(path: Path) -> None:
    if path.parent.name != "compat":
        assert private_uses(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._subclasses import FakeTensor",
        "from transformers.masking_utils import _ignore_causal_mask_sdpa",
        "from numba.core import config",
        "torch._C._dispatch_keys(x)",
        "forward_ad._current_level",
        "mask._version",
        "getattr(model, '_is_stateful', False)",
        "function._dynamo_marked_constant = True",
    ],
)
def test_a_private_function_is_found(source: str) -> None:
    assert private_uses(source)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("__init__", {"numpy", "torch", "numba", "transformers"}),
        ("programs", {"torch", "numba", "transformers"}),
        ("torch_private", {"numba", "transformers"}),
        ("numba_private", {"torch", "transformers"}),
        ("transformers_private", {"torch", "numba", "transformers"}),
    ],
)
def test_a_file_of_compat_loads_one_library(module: str, absent: set[str]) -> None:
    loaded = run(f"import sys, lowtri.compat.{module}; print(*{{name.split('.')[0] for name in sys.modules}})")
    assert set(loaded.split()) & absent == set()


ATTENTION = """
import lowtri
x = torch.randn(1, 2, 20, 8, generator=torch.Generator().manual_seed(0))
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
assert (lowtri.attention(x, x, x, "causal") - expected).abs().max() < 1e-5
print(lowtri.which_engine(x, x, x, "causal").answers["cpu"])
"""


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["torch._C._dispatch_keys", "torch._C._functorch.peek_interpreter_stack"])
def test_without_the_dispatcher_s_keys_kernels_do_not_run_and_the_reason_is_given(name: str) -> None:
    assert f"has no {name}" in run(f"import torch; del {name}\n{ATTENTION}")


@pytest.mark.sweep
def test_attention_runs_without_functions_for_special_tensors() -> None:
    run(f"""
import torch
del torch._C._nn.scaled_dot_product_attention, torch._C._functorch.is_legacy_batchedtensor, torch._is_functional_tensor
{ATTENTION}""")


def test_gradients_of_a_compiled_program_name_the_function_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_ForceDispatchKeyGuard")
    with pytest.raises(EngineError, match=r"has no torch\._C\._ForceDispatchKeyGuard.*\nFix:"), recording_gradients():
        pass


def test_batched_gradients_name_the_function_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    output = lowtri.attention(x, x, x, "causal")
    monkeypatch.setattr(tensors, "vmap_level", lambda: torch_private._require("_C._no_such_function"))
    with pytest.raises(EngineError, match=r"has no torch\._C\._no_such_function.*\nFix:"):
        torch.autograd.grad(output, x, torch.ones(3, *x.shape), is_grads_batched=True)


def test_mask_functions_that_transformers_lacks_are_none() -> None:
    assert transformers_private.known_mask_function("no_such_function", 3) is None
    assert transformers_private.known_mask_function("sliding_window_overlay", 3) is not None


def test_a_model_that_says_nothing_of_itself_is_taken_for_an_ordinary_one() -> None:
    model = torch.nn.Linear(2, 2)
    assert transformers_private.has_interface(model)
    assert transformers_private.attention_name(model) is None
    assert not transformers_private.is_stateful(model)


def test_layers_return_weights_where_transformers_does_not_collect_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not transformers_private.collects_attentions()
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", None)
    assert transformers_private.collects_attentions()
