"""ONNX's Attention operator on lowtri: every case of the standard's own tests, and any attributes against its evaluator."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from attention_cases import near
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.backend.test.case.node import _NodeTestCases as NODE_CASES
from onnx.reference import ReferenceEvaluator
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
