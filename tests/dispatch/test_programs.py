"""attention inside a program: torch.compile without a graph break, torch.export, and torch's own checks of an operator.

The same call outside of the program is what each is compared with, to the bit: the operator runs the engine that the call would.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from programs import Attend, compiled, leaves, outcome, same
from random_masks import Case, cases
from torch import nn

import lowtri
from lowtri import MaskError, attention, causal, documents, first, full, heads, hidden, keys, table, where, window
from lowtri.dispatch import operators
from lowtri.masks.text import from_text, to_text
from lowtri.nn import Decoder, DecoderConfig

pytestmark = [
    pytest.mark.not_emulated,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks at every tensor it meets
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # inductor imports it
]
IDS = torch.tensor([[0] * 10 + [1] * 30, [0] * 20 + [1] * 20])
PACKED = causal() & documents(IDS)
PLACES = torch.arange(40)
OUTSIDE = lowtri.alibi(torch.tensor([0.5, 0.25, 0.125, 0.0]))
FORMULA = where(lambda q, k: k <= q)

CASES: dict[str, Callable[..., Any]] = {
    "text": lambda q, k, v, ids, bias, sinks: attention(q, k, v, "causal & window(7)"),
    "a mask from outside": lambda q, k, v, ids, bias, sinks: attention(q, k, v, PACKED, engine="cpu"),
    "masks made inside": lambda q, k, v, ids, bias, sinks: (
        attention(q, k, v, (causal() - window(3)) | first(2))
        + attention(q, k, v, heads([causal(), full(), window(3), first(3)]))
    ),
    "texts read inside": lambda q, k, v, ids, bias, sinks: (
        attention(q, k, v, heads(["causal", "full", window(3), "causal & documents(lengths=[9, 31])"]))
        + attention(q, k, v, lowtri.mask("window(5)") & keys(ids > 0))
    ),
    "masks of tensors": lambda q, k, v, ids, bias, sinks: (
        attention(q, k, v, causal() & documents(ids), engine="cpu")
        + attention(q, k, v, causal() & keys(ids > 0))
        + attention(q, k, v, hidden(torch.ones(40, 40).triu(1) > 0))
    ),
    "every option": lambda q, k, v, ids, bias, sinks: attention(
        q, k, v, PACKED, engine="cpu", scale=0.3, softcap=2.0, bias=bias, sinks=sinks
    ),
    "positions": lambda q, k, v, ids, bias, sinks: attention(
        q, k, v, "causal", return_lse=True, engine="formula", q_positions=PLACES + 2, k_positions=PLACES
    )[0],
    "log-sum-exp": lambda q, k, v, ids, bias, sinks: attention(q, k, v, "causal", return_lse=True, engine="cpu")[1],
    "biases over distances": lambda q, k, v, ids, bias, sinks: (
        attention(q, k, v, "causal", bias=lowtri.alibi(sinks), engine="cpu")
        + attention(q, k, v, "window(9)", bias=lowtri.distance_bias(bias[:4], first=-20))
        + attention(q, k, v, "causal", bias=OUTSIDE)
    ),
    "three dimensions": lambda q, k, v, ids, bias, sinks: attention(q[0], k[0], v[0], "causal", engine="cpu"),
}


def inputs(n: int = 40, seed: int = 0) -> list[torch.Tensor]:
    """q (2, 4, n, 16), k and v (2, 2, n, 16)."""
    return leaves(n, n, seed)


@pytest.mark.parametrize("name", CASES)
def test_compiled_whole_it_gives_the_same(name: str) -> None:
    fn, x = CASES[name], inputs()
    bias, sinks = torch.linspace(-1, 1, 1600).reshape(40, 40), torch.tensor([0.5, -1.0, 0.0, 2.0])
    if name in ("every option", "biases over distances"):
        bias.requires_grad_()
        sinks.requires_grad_()
    arguments = (*x, IDS, bias, sinks)
    assert same(outcome(compiled(fn), arguments), outcome(fn, arguments))


def test_autocast_is_at_the_door_of_the_program() -> None:
    x = inputs()
    program = compiled(lambda q, k, v: attention(q, k, v, "causal"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, right = program(*x), attention(*x, "causal")
    assert found.dtype == torch.bfloat16 and torch.equal(found, right)


def test_exported_with_its_mask_and_stored() -> None:
    module, file = Attend(PACKED), io.BytesIO()
    torch.export.save(torch.export.export(module, tuple(inputs())), file)
    file.seek(0)
    program = torch.export.load(file)
    assert sum("lowtri.attention" in str(node.target) for node in program.graph.nodes) == 1
    x = inputs(seed=1)
    assert torch.equal(program.module()(*x), module(*x))


def test_a_mask_without_arrays_passes_no_list() -> None:
    """AOTInductor's packages cannot pass an empty list of tensors to an operator."""
    program = torch.export.export(Attend("causal"), tuple(inputs()))
    (node,) = (node for node in program.graph.nodes if "lowtri.attention" in str(node.target))
    assert node.args[3:] == ("mask=causal", None, None, None)


@pytest.mark.sweep
@pytest.mark.filterwarnings(
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"
)  # in torch's own code
@pytest.mark.parametrize("mask", ["causal", causal() & documents(IDS)], ids=["a text", "arrays"])
def test_a_package_of_aot_inductor(mask: Any, tmp_path: Path) -> None:
    x = [tensor.detach() for tensor in inputs()]
    program = torch.export.export(Attend(mask).eval(), tuple(x))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(path)(*x), attention(*x, mask))


def test_a_strict_export_refuses_what_it_would_lose() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported) as told:
        torch.export.export(Attend(PACKED), tuple(inputs()), strict=True)
    assert "does not keep the arrays of a mask, since they are NumPy's. Fix: strict=False" in str(told.value)
    module = Attend("causal & window(7)")
    program = torch.export.export(module, tuple(inputs()), strict=True).module()
    assert torch.equal(program(*inputs(seed=1)), module(*inputs(seed=1)))


def test_exported_with_labels_as_an_input() -> None:
    class Packed(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, causal() & documents(ids))

    module = Packed()
    program = torch.export.export(module, (*inputs(), IDS)).module()
    x = inputs(seed=1)
    assert torch.equal(program(*x, 1 - IDS), module(*x, 1 - IDS))


def test_exported_for_any_length() -> None:
    module, length = Attend("causal & window(7)"), torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(module, tuple(inputs()), dynamic_shapes=({2: length},) * 3)
    for n in (5, 90):
        # With gradients, few queries run on the decode kernel only in a program.
        x = [tensor.detach() for tensor in inputs(n)]
        assert torch.equal(program.module()(*x), module(*x))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("engine", ["cpu", "formula", "sdpa"])
def test_torch_checks_the_operators(engine: str, dropout: float) -> None:
    """Schema, fake rule, autograd and dynamic tracing, as torch.library.opcheck tests them."""
    q, k, v = inputs(20)
    bias, sinks = torch.randn(2, 1, 20, 20, requires_grad=True), torch.randn(4, requires_grad=True)
    given: dict[str, torch.Tensor] = {} if engine == "sdpa" else {"bias": bias, "sinks": sinks}
    flags = {
        "sdpa": [],
        "formula": ["return_weights", "return_received"],
        "cpu": ["return_weights", "return_received", "return_lse"],
    }
    words = [*flags[engine], f"engine={engine}", *given]
    tensors, factors = [*given.values()], []
    if dropout:
        words += ["seed", "dropout"]
        tensors.append(torch.tensor(5))
        factors.append(dropout)
    text = "; ".join([*words, "mask=causal & documents(_0) & window(_1)"])
    arguments = (q, k, v, text, [*tensors, IDS[:, :20]], factors or None, [operators._AN_ARRAY, 7])
    good = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert torch.library.opcheck(operators._attention, arguments) == dict.fromkeys(good, "SUCCESS")
    plain = (q.detach(), k.detach(), v.detach(), text, [x.detach() for x in arguments[4]], *arguments[5:])
    for operator in (operators._attention_forward, operators._attention_output, operators._attention_for_gradients):
        assert torch.library.opcheck(operator, plain) == dict.fromkeys(good, "SUCCESS")
    output, *_, lse = operators._attention_for_gradients(*plain)
    wanted = [True, True, False, *[True for _ in given]]
    d_results = [torch.ones_like(output), None, lse if engine == "cpu" else None]
    found = torch.library.opcheck(operators._backward, (d_results, output, lse, wanted, *plain))
    assert found == dict.fromkeys(good, "SUCCESS")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_a_step_of_training_compiled(backend: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    model = Decoder(DecoderConfig(vocab_size=50, num_hidden_layers=1, **sizes))
    program, ids = compiled(model, backend), torch.randint(50, (2, 24))
    weights = list(model.parameters())
    found, right = (
        torch.autograd.grad(nn.functional.cross_entropy(one(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), weights)
        for one in (program, model)
    )
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.sweep
def test_a_python_formula_runs_outside_of_the_graph() -> None:
    """A graph break, and an error where the program must be whole."""
    x = inputs()

    def fn(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, FORMULA)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs outside of the graph"):
        compiled(fn)(*x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fn, backend="eager")(*x), fn(*x))


@pytest.mark.sweep
def test_wrong_arguments_raise_as_in_eager_mode() -> None:
    x = inputs()
    with pytest.raises(MaskError, match="there is no mask 'casual'"):
        compiled(lambda q, k, v: attention(q, k, v, "casual"))(*x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="mask: got None; expected a mask"):
        compiled(lambda q, k, v: attention(q, k, v, None))(*x)
    with pytest.raises(lowtri.CallError, match="k and v differ in length"):
        compiled(lambda q, k, v: attention(q, k, v[:, :, :8], "causal"))(*x)
    with pytest.raises(MaskError, match="ids is float32"):
        compiled(lambda q, k, v, ids: attention(q, k, v, documents(ids)))(*x, IDS.float())


@pytest.mark.parametrize("make", [lowtri.mask, lambda text: heads(["causal", text])])
def test_a_text_that_cannot_be_read_is_told_while_the_program_is_traced(make: Any) -> None:
    with pytest.raises(Exception, match="MaskError: mask: there is no mask 'casual'"):
        compiled(lambda q, k, v: attention(q, k, v, make("causal & casual")))(*inputs())


def test_a_text_is_read_anew_for_each_program() -> None:
    """What a traced text leaves behind is a mask like any other, and another text finds another."""
    q, k, v = inputs()
    for text in ("window(2)", "window(3)", "window(2)", "causal & documents(lengths=[10, 30])"):

        def fn(q: Any, k: Any, v: Any, text: str = text) -> Any:
            return attention(q, k, v, lowtri.mask(text))

        assert torch.equal(compiled(fn, "eager")(q, k, v), fn(q, k, v)), text


def test_gradients_of_gradients_are_refused() -> None:
    x = inputs()
    program = compiled(lambda q, k, v: attention(q, k, v, "causal", engine="cpu"), "eager")
    grads = torch.autograd.grad(program(*x).sin().sum(), x, create_graph=True)
    words = r"lowtri.attention_backward: a compiled program has no gradients of gradients"
    with pytest.raises(RuntimeError, match=words):
        grads[0].sum().backward()


@settings(deadline=None, max_examples=60)
@given(cases)
def test_packed_and_unpacked_a_mask_is_the_same(case: Case) -> None:
    text, arrays = to_text(case.mask)
    assert (text is None) == ("where(" in repr(case.mask))
    if text is not None:
        assert from_text(text, arrays) == case.mask
        assert from_text(text, arrays) is from_text(text, [a.copy() for a in arrays])


def test_texts_interleaved_mix_nothing_up() -> None:
    """The last masks are known again by their content, which may have changed in place."""
    ids = np.array([0, 0, 1, 1])
    turns = [("documents(_0)", ids), ("documents(_0)", 1 - ids), ("causal & documents(_0)", ids), ("keys(_0)", ids > 0)]
    for text, array in turns * 2:
        assert from_text(text, [array]) == from_text(text, [array.copy()]) == read(text, array)
    before = from_text("documents(_0)", [ids])
    ids[0] = 7
    assert from_text("documents(_0)", [ids]) == documents(ids) != before
    with pytest.raises(MaskError, match="it takes bools"):
        from_text("keys(_0)", [(ids > 0).astype(int)])
    with pytest.raises(MaskError, match="is not what to_text returns"):
        from_text("documents(_0, _1)", [ids])


def read(text: str, array: Any) -> Any:
    made = keys(array) if "keys" in text else documents(array)
    return causal() & made if "causal" in text else made


def test_packed_masks_in_words() -> None:
    assert to_text(FORMULA) == (None, [])
    assert to_text(causal() & ~FORMULA)[0] is to_text(heads([FORMULA]))[0] is None
    shown = (causal() | first(2)) & ~documents([0, 1], [1, 0]) - table([[True, False], [True, True]])
    text, arrays = to_text(shown)
    assert text == "(causal | first(2)) & (~documents(_0, _1) & ~table(_2))"
    assert [a.tolist() for a in arrays] == [[0, 1], [1, 0], [[True, False], [True, True]]]
    both = "documents(lengths=[2, 3]) & keys(lengths=[1, 2])"
    assert to_text(lowtri.mask(both))[0] == both
    with pytest.raises(MaskError, match="is not what to_text returns"):
        from_text("documents(_1)", [IDS.numpy()])
