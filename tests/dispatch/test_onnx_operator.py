"""ONNX's Attention operator on lowtri: every case of the standard's own tests, and any attributes against its evaluator."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.backend.test.case.node import _NodeTestCases as NODE_CASES
from onnx.reference import ReferenceEvaluator

from attention_cases import EPS, near
from onnx_operator import Outputs, attention

NAMES = {"float32": "FLOAT", "float16": "FLOAT16", "float64": "DOUBLE", "bfloat16": "BFLOAT16"}  # as ONNX calls them
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")

importlib.import_module("onnx.backend.test.case.node.attention")  # lists its cases in NODE_CASES


def is_attention(case):
    return [node.op_type for node in case.model.graph.node] == ["Attention"]


CASES = {case.name: case for case in NODE_CASES if is_attention(case)}


def named(names, values, known):
    """What a node's list of names, with "" for what is left out, says about a list of values."""
    given = iter(values)
    return {name: next(given) for place, name in zip(names, known, strict=False) if place}


def tensor(array):
    """A NumPy array as a tensor; NumPy knows bfloat16 only as a foreign type of two bytes."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def dtype_of(x):
    return str(x.dtype).removeprefix("torch.")


# The standard's cases


def test_the_cases_are_there():
    """ONNX 1.23 has 93 of them; a list that came out empty would pass everything."""
    assert len(CASES) >= 93
    assert {case.model.opset_import[0].version for case in CASES.values()} >= {23, 24, 25}


@pytest.mark.sweep
def test_every_case_is_in_the_table():
    """All node cases of the package, of all operators, hold Attention nowhere but where the cases above came from."""
    code = (  # the cases of other operators warn of their divisions by zero
        "from onnx.backend.test.loader import load_model_tests\n"
        "for case in load_model_tests(kind='node'):\n"
        "    if any(node.op_type == 'Attention' for node in case.model.graph.node): print(case.name)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(CASES)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_of_the_standard(case, kind):
    (node,), ((arrays, expected),) = case.model.graph.node, case.data_sets
    inputs = named(node.input, arrays, INPUTS)
    attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    if kind == "torch":
        inputs = {name: tensor(array) for name, array in inputs.items()}
    wanted = named(node.output, expected, Outputs._fields)
    found = attention(**inputs, **attributes, return_qk_matmul="qk_matmul_output" in wanted)
    for name, exact in wanted.items():
        came = getattr(found, name)
        assert dtype_of(came) == exact.dtype.name
        if kind == "torch":
            came = came.double().numpy()
        # ONNX's own runner gives bfloat16 two units in the last place; what it expects in float16 is off by one itself.
        rtol = {"bfloat16": 2**-6, "float16": 2**-9}.get(exact.dtype.name, 0)
        np.testing.assert_allclose(np.float64(came), np.float64(exact), rtol=max(case.rtol, rtol), atol=case.atol)


# Any mix of attributes


@st.composite
def calls(draw):
    """Inputs and attributes of any kind that fit together, float64."""
    pick = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    rng = np.random.default_rng(pick(0, 2**32))
    rows, kv_heads, group, nq, nk, size, value_size = (pick(1, n) for n in (2, 2, 2, 5, 6, 4, 4))
    q = rng.normal(size=(rows, kv_heads * group, nq, size))
    k, v = (rng.normal(size=(rows, kv_heads, nk, n)) for n in (size, value_size))
    inputs = {"Q": q, "K": k, "V": v}
    total, cache = nk, draw(st.sampled_from(["none", "past", "whole"]))
    if cache == "past":
        past = pick(1, 4)
        inputs |= {"past_key": rng.normal(size=(rows, kv_heads, past, size))}
        inputs |= {"past_value": rng.normal(size=(rows, kv_heads, past, value_size))}
        total += past
    elif cache == "whole":
        inputs |= {"nonpad_kv_seqlen": rng.integers(0, nk + 1, rows)}
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, n])) for n in (rows, kv_heads * group, nq)]
        shape = [*shape, pick(1, total)][pick(0, 3) :]
        allowed = rng.random(shape) < 0.7
        as_bools = draw(st.booleans())
        inputs["attn_mask"] = allowed if as_bools else np.where(allowed, rng.normal(size=shape), -np.inf)
    attributes = {
        "is_causal": pick(0, 1),
        "left_window_size": pick(-1, 3),
        "right_window_size": pick(-1, 3),
        "qk_matmul_output_mode": pick(0, 3),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
    }
    if draw(st.booleans()):
        attributes["scale"] = 0.25
    if draw(st.booleans()):
        attributes |= {"q_num_heads": kv_heads * group, "kv_num_heads": kv_heads}
        for name in "QKV":
            x = inputs[name].swapaxes(1, 2)
            inputs[name] = x.reshape(*x.shape[:2], -1)
    return inputs, attributes


def reference(inputs, attributes):
    """The outputs of ONNX's reference evaluator, by name."""
    if "attn_mask" in inputs:  # it takes a mask's last two dimensions as the numbers of queries and keys
        mask, nq = inputs["attn_mask"], inputs["Q"].shape[-2]
        inputs = inputs | {"attn_mask": np.broadcast_to(mask, (*mask.shape[:-2], nq, mask.shape[-1]))}
    if attributes["qk_matmul_output_mode"] == 0:
        # Its mode 0 gives the scores after the softcap; the standard says: the raw ones.
        attributes = attributes | {"softcap": 0.0}
    kinds = {np.dtype(bool): TensorProto.BOOL, np.dtype("int64"): TensorProto.INT64}
    node = helper.make_node(
        "Attention", [name if name in inputs else "" for name in INPUTS], Outputs._fields, **attributes
    )
    infos = [
        helper.make_tensor_value_info(name, kinds.get(x.dtype, TensorProto.DOUBLE), x.shape)
        for name, x in inputs.items()
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in Outputs._fields]
    graph = helper.make_graph([node], "one", infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    found = ReferenceEvaluator(model).run(None, inputs)
    return Outputs(*found)


@settings(max_examples=300, deadline=None)
@given(calls())
def test_any_call_gives_what_the_reference_evaluator_gives(call):
    inputs, attributes = call
    found = attention(**inputs, **attributes, return_qk_matmul=True)
    expected = reference(inputs, attributes)
    if attributes["qk_matmul_output_mode"] == 0:
        assert near(found.qk_matmul_output, expected.qk_matmul_output, "float64", times=32)
        return  # with Y it went without softcap
    for name in ("Y", "qk_matmul_output"):
        # Sums of at most ten products, in another order: a few roundings each, and those of exp.
        assert near(getattr(found, name), getattr(expected, name), "float64", times=32), name
    if "nonpad_kv_seqlen" in inputs:
        assert found.present_key is None and found.present_value is None
    else:
        assert np.array_equal(found.present_key, expected.present_key)
        assert np.array_equal(found.present_value, expected.present_value)


@settings(max_examples=100, deadline=None)
@given(calls())
def test_tensors_give_what_arrays_give(call):
    inputs, attributes = call
    arrays = attention(**inputs, **attributes, return_qk_matmul=True)
    tensors = attention(
        **{name: torch.from_numpy(x) for name, x in inputs.items()}, **attributes, return_qk_matmul=True
    )
    for one, other in zip(arrays, tensors, strict=True):
        assert (one is None) == (other is None)
        assert one is None or near(other, one, "float64", times=32)


# What the cases leave open


def some(rows=2, heads=4, kv_heads=2, nq=5, nk=5, size=8, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, heads, nq, size), (rows, kv_heads, nk, size), (rows, kv_heads, nk, size))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def test_step_by_step_is_all_at_once():
    q, k, v = some(nq=9, nk=9)
    whole = attention(q, k, v, is_causal=1, left_window_size=3)
    past, steps = {}, []
    for new in (slice(0, 4), slice(4, 5), slice(5, 9)):
        out = attention(q[:, :, new], k[:, :, new], v[:, :, new], **past, is_causal=1, left_window_size=3)
        past = {"past_key": out.present_key, "past_value": out.present_value}
        steps.append(out.Y)
    assert near(np.concatenate(steps, 2), whole.Y, "float32")
    assert np.array_equal(out.present_key, k) and np.array_equal(out.present_value, v)


def test_hidden_garbage_leaves_no_trace():
    """Pads, pairs that bools forbid, and pairs that -inf forbids."""
    q, k, v = some()
    spoilt_k, spoilt_v = k.copy(), v.copy()
    spoilt_k[:, :, 3:], spoilt_v[:, :, 3:] = np.nan, np.inf
    allowed = np.arange(5) < 3
    ways = {
        "nonpad": {"nonpad_kv_seqlen": np.array([3, 3])},
        "bools for the keys": {"attn_mask": allowed},
        "bools for pairs": {"attn_mask": np.tile(allowed, (5, 1))},
        "-inf for pairs": {"attn_mask": np.where(np.tile(allowed, (5, 1)), 0, -np.inf).astype(np.float32)},
        "a short mask": {"attn_mask": np.zeros((5, 3), np.float32)},
    }
    expected = attention(q, k[:, :, :3], v[:, :, :3]).Y
    for name, way in ways.items():
        assert near(attention(q, spoilt_k, spoilt_v, **way).Y, expected, "float32"), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_large_calls_of_every_dtype(dtype, kind):
    """Large enough for a kernel where there is one; NumPy's bfloat16 is a foreign type."""
    as_numpy = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(NAMES[dtype]))
    arrays = [x.astype(as_numpy) for x in some(nq=300, nk=300, size=32, dtype=np.float64)]
    exact = attention(*(x.astype(np.float64) for x in arrays), is_causal=1, engine="reference")
    found = attention(*(map(tensor, arrays) if kind == "torch" else arrays), is_causal=1).Y
    assert dtype_of(found) == dtype
    assert near(found.double() if kind == "torch" else found, exact.Y, dtype)


def test_softmax_precision_is_the_least():
    q, k, v = some(size=64)
    exact = attention(*(x.astype(np.float64) for x in (q, k, v)), return_qk_matmul=True, qk_matmul_output_mode=3)
    options = {"return_qk_matmul": True, "qk_matmul_output_mode": 3, "engine": "formula"}
    off = {}
    for precision in (None, 1, 10, 16, 11):
        found = attention(q, k, v, softmax_precision=precision, **options)
        assert found.Y.dtype == found.qk_matmul_output.dtype == np.float32
        off[precision] = float(np.abs(found.qk_matmul_output - exact.qk_matmul_output).max())
    assert off[11] <= EPS["float32"] / 2, "float64 rounded once"
    assert off[10] == off[16] == off[1] == off[None] > off[11], "never less than float32"


def test_values_of_another_type_than_keys():
    q, k, v = some(dtype=np.float16)
    found = attention(q, k, v.astype(np.float32))
    assert found.Y.dtype == np.float16 and found.present_value.dtype == np.float32
    assert near(found.Y, attention(q, k, v).Y, "float16")


def test_mode_0_is_before_the_softcap():
    q, k, v = some()
    found = attention(q, k, v, softcap=0.5, return_qk_matmul=True).qk_matmul_output
    raw = np.repeat(k, 2, 1) @ q.swapaxes(2, 3)  # (B, Hq, Nk, Nq)
    assert near(found, raw.swapaxes(2, 3) / np.sqrt(8), "float32")
    capped = attention(q, k, v, softcap=0.5, return_qk_matmul=True, qk_matmul_output_mode=1).qk_matmul_output
    assert np.abs(found).max() > 0.5 > np.abs(capped).max()


def test_the_fourth_output_is_given_on_request_only():
    q, k, v = some()
    assert attention(q, k, v, qk_matmul_output_mode=3).qk_matmul_output is None


def test_gradients_go_through():
    q, k, v = (
        torch.from_numpy(x).requires_grad_()
        for x in some(rows=1, heads=2, kv_heads=1, nq=3, nk=3, size=2, dtype=np.float64)
    )
    bias = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def both(q, k, v, bias):
        out = attention(q, k, v, bias, is_causal=1, softcap=2.0, return_qk_matmul=True, qk_matmul_output_mode=1)
        return out.Y, out.qk_matmul_output

    assert torch.autograd.gradcheck(both, (q, k, v, bias))


def test_numbers_and_flags_of_numpy_are_numbers_and_flags():
    q, k, v = some()
    numbers = {"scale": np.float32(0.5), "softcap": np.float64(2), "left_window_size": np.int64(2)}
    found = attention(q, k, v, is_causal=np.bool_(True), q_num_heads=np.int64(q.shape[1]), **numbers)
    expected = attention(q, k, v, is_causal=1, scale=0.5, softcap=2.0, left_window_size=2)
    assert np.array_equal(found.Y, expected.Y)
