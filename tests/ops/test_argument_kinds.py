"""Arrays of every kind as arguments: each call gives the float64 definition's numbers or one of lowtri's errors, and nothing else.

The kinds: dtypes, subclasses of torch's and NumPy's arrays, views that torch reads lazily, layouts, tensors without numbers, and
positions of every integer dtype, up to the extremes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import near
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import compiled
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.utils import _pytree as pytree

import lowtri
from lowtri import CallError, KVCache, LowtriError, MaskError, attention
from lowtri.integrations.dense_mask import read_dense_mask as given_table
from lowtri.masks import POSITION_MAX as END

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of (Masked|nested)", "ignore:Lower right causal bias", "ignore:the matrix subclass"
)


class Named(torch.Tensor):
    """A subclass that does nothing."""


class Refusing(torch.Tensor):
    """A subclass that no function of torch takes: nothing but its type can be asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("not this one")


class Wrapper(torch.Tensor):
    """A subclass whose numbers lie in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(lambda x: x.inner if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return pytree.tree_map(lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


class Turned(np.ndarray):
    """A subclass of NumPy's array that computes in its own way."""

    def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **options: Any) -> Any:
        return np.zeros(self.shape)


def across_bytes(x: torch.Tensor) -> Any:
    """A NumPy view whose numbers do not lie at multiples of their size."""
    array = x.numpy()
    rows = np.zeros(array.shape, dtype=[("x", array.dtype), ("pad", "i1")])
    rows["x"] = array
    return rows["x"]


def made_in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def functional(x: torch.Tensor) -> torch.Tensor:
    return torch._to_functional_tensor(x)


FAKE = FakeTensorMode()
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": torch.clone,
    "Parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=x.is_floating_point()),
    "Buffer": lambda x: torch.nn.Buffer(x.clone()),
    "requires_grad": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "inference": made_in_inference_mode,
    "negative view": lambda x: x if x.dtype == torch.bool else torch._neg_view(-x),
    "imaginary part": lambda x: torch.complex(x, -x).conj().imag if x.is_floating_point() else x,
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x.clone().expand(x.shape),
    "functional": functional,
    "subclass": lambda x: x.clone().as_subclass(Named),
    "refusing": lambda x: x.clone().as_subclass(Refusing),
    "wrapper": lambda x: Wrapper(x.clone()),
    "masked": lambda x: masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "causal bias": lambda x: causal_upper_left(*(x.shape * 2)[-2:]),
    "fake": FAKE.from_tensor,
    "meta": lambda x: x.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "nested": lambda x: torch.nested.nested_tensor([x]),
    "jagged": lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
    "no dimension": lambda x: x.flatten()[0],
    "empty": lambda x: x[..., :0],
    "double": torch.Tensor.double,
    "bfloat16": torch.Tensor.bfloat16,
    "complex": lambda x: x.to(torch.complex64),
    "None": lambda x: None,
    "list": torch.Tensor.tolist,
}
ARRAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda x: x.numpy().copy(),
    "backwards": lambda x: np.flip(np.flip(x.numpy()).copy()),
    "Fortran's order": lambda x: np.asfortranarray(x.numpy()),
    "read-only": lambda x: np.broadcast_to(x.numpy(), x.shape),
    "across bytes": across_bytes,
    "other byte order": lambda x: x.numpy().astype(x.numpy().dtype.newbyteorder()),
    "memory map": lambda x: x.numpy().view(np.memmap),
    "subclass": lambda x: x.numpy().view(Turned),
    "masked": lambda x: np.ma.masked_array(x.numpy(), mask=np.arange(x.numel()).reshape(x.shape) % 3 == 0),
    "matrix": lambda x: np.asmatrix(x.numpy().reshape(-1, x.shape[-1])),
    "objects": lambda x: x.numpy().astype(object),
    "double": lambda x: x.numpy().astype(np.float64),
    "long double": lambda x: x.numpy().astype(np.longdouble),
    "complex": lambda x: x.numpy().astype(complex),
    "no dimension": lambda x: x.numpy().flatten()[0],
    "empty": lambda x: x.numpy()[..., :0],
    "list": lambda x: x.tolist(),
}
MEANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # kinds with other numbers than the plain tensor
    "bfloat16": torch.Tensor.bfloat16,
    "no dimension": lambda x: x.flatten()[0],
    "empty": lambda x: x[..., :0],
    "causal bias": torch.zeros_like,  # under a causal mask it says nothing new
}
PLAINLY = {  # which must give numbers wherever their values are those of the plain tensor
    *("plain", "Parameter", "Buffer", "requires_grad", "inference", "negative view", "imaginary part", "every second"),
    *("expanded", "backwards", "Fortran's order", "read-only", "across bytes", "memory map"),
}
NUMBERS = ("q", "k", "v", "bias", "sinks")
WHOLE = ("q_positions", "k_positions", "ids")
BOOLS = ("valid", "bools")


def arguments(n: int, d: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(n)
    made = {name: torch.randn(1, 2, n, d, generator=source) for name in "qkv"}
    made |= {"bias": torch.randn(n, n, generator=source), "sinks": torch.randn(2, generator=source)}
    made |= {"q_positions": torch.arange(n), "k_positions": torch.arange(n), "ids": torch.arange(n) // 3}
    return made | {"valid": torch.arange(n) % 4 > 0, "bools": torch.rand(n, n, generator=source) < 0.7}


def call(given: dict[str, Any], engine: str) -> Any:
    mask = lowtri.causal()
    for name, make in (("ids", lowtri.documents), ("valid", lowtri.keys), ("bools", lowtri.table)):
        if name in given:
            mask = mask & make(given.pop(name))
    return attention(given.pop("q"), given.pop("k"), given.pop("v"), mask, engine=engine, **given)


def numbers(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        if torch._is_functional_tensor(x):
            torch._sync(x)
            x = torch._from_functional_tensor(x)
        return x.double().numpy(force=True)
    return np.asarray(x, np.float64)


def right_or_refused(kinds: dict[str, str], library: str, n: int, d: int, engine: str) -> bool:
    """Whether the call ran; its numbers are then those of the definition for the same numbers without any kind."""
    makers, plain = (TENSORS, torch.clone) if library == "torch" else (ARRAYS, torch.Tensor.numpy)
    clean = arguments(n, d)
    clean = {name: x for name, x in clean.items() if name in ("q", "k", "v") or name in kinds}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's prototypes announce themselves
        odd = {name: makers[kinds[name]](x) if name in kinds else plain(x) for name, x in clean.items()}
    if any(x is None for x in odd.values()):  # such an argument was not given
        clean = {name: x for name, x in clean.items() if odd[name] is not None}
        odd = {name: x for name, x in odd.items() if x is not None or name in "qkv"}
        if any(odd[name] is None for name in "qkv"):
            clean = arguments(n, d)
    clean = {name: MEANS.get(kinds.get(name, ""), torch.clone)(x) for name, x in clean.items()}
    exact = {name: x.double().numpy() if x.is_floating_point() else x.numpy() for name, x in clean.items()}
    try:
        found = call(dict(odd), engine)
        tensors = {name: x for name, x in odd.items() if isinstance(x, torch.Tensor) and not isinstance(x, CausalBias)}
        leaves = [name for name, x in tensors.items() if x.is_leaf and x.requires_grad]
        grads = torch.autograd.grad(found.double().square().sum(), [odd[name] for name in leaves]) if leaves else []
    except LowtriError:
        return False
    if any(kind in ("fake", "meta") for kind in kinds.values()):  # a shape without numbers
        assert found.shape == (*exact["q"].shape[:-1], exact["v"].shape[-1])
        return True
    dtype = "bfloat16" if "bfloat16" in kinds.values() else "float32"
    assert near(numbers(found), call(dict(exact), "reference"), dtype, times=64)
    if leaves:
        tensors = {name: torch.from_numpy(x).requires_grad_(name in leaves) for name, x in exact.items()}
        right = call(dict(tensors), "reference").square().sum()
        for grad, truth in zip(grads, torch.autograd.grad(right, [tensors[name] for name in leaves]), strict=True):
            assert near(numbers(grad), truth, dtype, times=256)
    return True


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", [*NUMBERS, *WHOLE, *BOOLS])
def test_each_argument_of_each_kind(name: str, library: str) -> None:
    for kind in TENSORS if library == "torch" else ARRAYS:
        for engine in ("auto", "formula", "reference"):
            ran = right_or_refused({name: kind}, library, 6, 4, engine)
            assert ran or kind not in PLAINLY, (name, kind, engine)


kinds_of = {  # every other one such that calls run
    library: st.one_of(st.sampled_from(sorted(PLAINLY & set(makers))), st.sampled_from(sorted(makers)))
    for library, makers in (("torch", TENSORS), ("numpy", ARRAYS))
}


@pytest.mark.sweep
@settings(deadline=None, max_examples=600)
@given(st.data())
def test_arguments_of_many_kinds_at_once(data: Any) -> None:
    library = data.draw(st.sampled_from(sorted(kinds_of)))
    names = data.draw(st.sets(st.sampled_from([*NUMBERS, *WHOLE, *BOOLS]), min_size=1, max_size=4))
    same = data.draw(st.booleans())  # of one kind all, as they come out of one model
    one = data.draw(kinds_of[library])
    kinds = {name: one if same else data.draw(kinds_of[library]) for name in sorted(names)}
    n, d = data.draw(st.sampled_from([(1, 1), (6, 4), (33, 8), (300, 64)]))
    right_or_refused(kinds, library, n, d, data.draw(st.sampled_from(["auto", "cpu", "sdpa", "formula", "reference"])))


# torch's CausalBias, which has a shape, a side, and no numbers.

SIZES = [(7, 7), (4, 7), (1, 7), (7, 4)]


@pytest.mark.parametrize(("nq", "nk"), SIZES)
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_bias_is_translated(make: Any, nq: int, nk: int) -> None:
    q, k = torch.randn(2, 3, nq, 8), torch.randn(2, 3, nk, 8)
    bias = make(nq, nk)
    table = bias._materialize()
    seen = table.any(1)  # a query that sees nothing gives 0 here and NaN there
    right = torchs(q, k, k, attn_mask=table).masked_fill(~seen[:, None], 0)
    assert near(lowtri.scaled_dot_product_attention(q, k, k, bias), right, "float32")


X = torch.randn(1, 2, 6, 4)
CAUSAL_BIAS = causal_upper_left(6, 6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: lowtri.scaled_dot_product_attention(X, X, X, causal_upper_left(5, 6)),
            r"of \(5, 6\), but there are 6 q",
        ),
        (
            lambda: attention(X, X, X, "full", bias=CAUSAL_BIAS),
            r'bias is a CausalBias, .* Fix: the mask "causal", or lowtri',
        ),
        (lambda: attention(X, X, X, CAUSAL_BIAS), r'got a bare CausalBias\. Fix: the mask "causal"'),
        # Computed with, it is uninitialised memory; torch before 2.8 refuses that itself.
        (
            lambda: attention(X, X, X, "full", bias=CAUSAL_BIAS * 1.0),
            "bias is a CausalBias, but subclasses|CausalBias only",
        ),
        (lambda: KVCache(CAUSAL_BIAS), r'got a bare CausalBias\. Fix: the mask "causal"'),
        (
            lambda: given_table(CausalBias(CausalVariant.UPPER_LEFT, 6, 6), 6, 6, torch.float32),
            "attention_mask is a Causal",
        ),
        (lambda: lowtri.table(CAUSAL_BIAS), "bools is a CausalBias"),
    ],
)
def test_causal_bias_that_does_not_fit(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((CallError, MaskError, NotImplementedError), match=words):
        call()


@pytest.mark.not_emulated
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Dynamo detected a call to a")
def test_causal_bias_in_a_program() -> None:
    q, bias = torch.randn(1, 2, 6, 4), causal_upper_left(6, 6)
    right = attention(q, q, q, "causal")
    twin = compiled(lambda q, bias: lowtri.scaled_dot_product_attention(q, q, q, bias), "eager")
    assert near(twin(q, bias), right, "float32")
    for call_it, words in (
        (lambda q, bias: attention(q, q, q, "full", bias=bias), "bias is a CausalBias, which has no data"),
        (lambda q, bias: attention(q, q, q, bias), "mask: got a bare CausalBias"),
    ):
        with pytest.raises(Exception, match=words):
            compiled(call_it, "eager")(q, bias)


def test_other_doors_refuse_subclasses() -> None:
    x = np.ones((1, 2, 3, 4), np.float32)
    masked = np.ma.masked_array(x, mask=x > 0)
    for door in (
        lambda: lowtri.merge([masked], [masked[..., 0]]),
        lambda: KVCache().append(masked, masked),
        lambda: lowtri.scaled_dot_product_attention(masked, x, x),
        lambda: lowtri.explain((masked[0], x[0], x[0]), mask="causal"),
    ):
        with pytest.raises(CallError, match=r"is a MaskedArray, but subclasses of NumPy's array are not taken\. Fix: "):
            door()
    with pytest.raises(CallError, match="append: k is list, but it takes NumPy arrays or torch tensors"):
        KVCache().append([[1.0]], [[1.0]])
    with pytest.raises(CallError, match="q_positions is a MaskedArray"):
        attention(x, x, x, "causal", q_positions=np.ma.masked_array([0, 1, 2], mask=[0, 1, 0]))
    with pytest.raises(CallError, match="generate: the prompt is a FakeTensor without numbers"):
        list(lowtri.generate(lambda ids: ids, FAKE.from_tensor(torch.arange(3)), max_new_tokens=1))


def test_the_fix_fits_the_subclass() -> None:
    x = torch.ones(3, 4)
    for odd, fix in (
        (x.as_subclass(Named), r"q is a Named, but .*Fix: q\.as_subclass\(torch\.Tensor\)"),
        (Wrapper(x), "q is a Wrapper, but .*Fix: a plain torch.Tensor with the values of q"),
        (np.asmatrix(x.numpy()), r"q is a matrix, but .*Fix: np\.asarray\(q\)"),
    ):
        with pytest.raises(CallError, match=fix):
            attention(odd, odd, odd, "causal")


def test_kernels_do_not_read_across_bytes() -> None:
    """A view of one field of records: its numbers lie 5 bytes apart, which no step in numbers says."""
    x = torch.randn(1, 2, 256, 64)
    odd = across_bytes(x)
    assert not odd.flags.aligned
    right = attention(x, x, x, "causal")
    for engine in ("cpu", "formula", "reference"):
        assert near(attention(odd, odd, odd, "causal", engine=engine), right, "float32", times=32)


@pytest.mark.parametrize("n", [1, 256])
@pytest.mark.parametrize("kind", ["every second", "expanded", "backwards"])
def test_kernels_read_sinks_in_any_layout(kind: str, n: int) -> None:
    q, k = torch.randn(1, 6, n, 64), torch.randn(1, 6, 256, 64)
    logits = torch.randn(6, 3)
    sinks = {
        "every second": logits[:, 1],
        "expanded": logits[:1, 1].expand(6),
        "backwards": logits[:, 0].numpy()[::-1],
    }[kind]
    dense = sinks.copy() if isinstance(sinks, np.ndarray) else sinks.clone().contiguous()
    q, k = (x.numpy() if isinstance(sinks, np.ndarray) else x for x in (q, k))
    for engine in ("cpu", "cpu", "formula"):  # the second call finds what the first one prepared
        found = attention(q, k, k, "causal", sinks=sinks, engine=engine)
        assert near(found, attention(q, k, k, "causal", sinks=dense, engine="reference"), "float32"), engine


def test_kernels_do_not_read_functional_tensors() -> None:
    odd = functional(torch.randn(1, 2, 600, 64))
    assert "no:" in lowtri.which_engine(odd, odd, odd, "causal").answers["cpu"]


# Positions of every integer dtype.

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
MASKS = ("causal", "full", "window(3)", "band(2, 2)", "band(300, 300)", "chunks(3)", "strided(3)", "first(3)")


@pytest.mark.parametrize("text", MASKS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_positions_of_every_dtype(dtype: str, text: str) -> None:
    """The narrow and the unsigned do not wrap in the formulas, asked directly or by way of a call."""
    most = min(np.iinfo(dtype).max, END - 1)
    places = [0, 1, 2, 3, 100, most - 3, most - 1, most]
    narrow, mask = np.array(places, dtype), lowtri.mask(text)
    truth = np.array([[mask(q, k) for k in places] for q in places])
    assert np.array_equal(mask(narrow[:, None], narrow), truth)
    assert [[mask(q, k) for k in narrow] for q in narrow] == truth.tolist()
    x = np.random.default_rng(0).normal(size=(8, 4))
    found = attention(x, x, x, mask, q_positions=narrow, k_positions=narrow)
    assert near(found, attention(x, x, x, lowtri.table(truth)), "float64")
    tiles = mask.tile(narrow[:, None], narrow[:, None] + np.array(1, dtype), narrow, narrow + np.array(1, dtype))
    inside = np.array(places) < np.iinfo(dtype).max  # the last one plus 1 has no such dtype
    assert np.array_equal(np.asarray(tiles == 2)[inside][:, inside], truth[inside][:, inside])


@pytest.mark.parametrize("first", [2**63, 2**64 - 5])
@pytest.mark.parametrize("name", ["q_positions", "k_positions"])
def test_positions_beyond_the_end_are_refused(name: str, first: int) -> None:
    x = np.ones((5, 4))
    for places in (np.arange(5, dtype=np.uint64) + np.uint64(first), np.arange(5) + (2**63 - 5), [END] * 5):
        with pytest.raises(CallError, match=rf"attention: {name} reaches \d+, but positions lie below 2\*\*62"):
            attention(x, x, x, "causal", **{name: places})
    with pytest.raises(CallError, match="positions reaches"):
        KVCache().append(x, x, np.arange(5, dtype=np.uint64) + np.uint64(first))
    assert lowtri.causal()(np.array([first], np.uint64), np.array([0])).all()  # a formula alone: the end of time
    with pytest.raises(MaskError, match="documents: ids reaches"):
        lowtri.documents(np.array([0, first], np.uint64))


def test_positions_below_zero_are_no_token_however_far_below() -> None:
    x = np.random.default_rng(0).normal(size=(4, 4))
    for text in MASKS:
        right = attention(x, x, x, text, q_positions=[0, 1, -1, 2], k_positions=[0, 1, -1, 2])
        for least in (-2, -128, -(2**63)):
            places = np.array([0, 1, least, 2])
            found = attention(x, x, x, text, q_positions=places, k_positions=places)
            assert np.array_equal(found, right), (text, least)


def test_edges_of_tiles_beyond_the_end_mean_for_ever() -> None:
    for edge in (np.uint64(2**63), np.uint64(2**64 - 1), 1e300, float("inf")):
        assert lowtri.causal().tile(7, np.array([edge]), 0, 5).tolist() == [2]
        assert lowtri.causal().tile(0, np.array([7]), 7, np.array([edge])).tolist() == [0]


whole = st.integers(-(2**63), 2**64 - 1)


@pytest.mark.sweep
@settings(deadline=None, max_examples=400)
@given(st.lists(st.one_of(st.integers(-3, 9), whole), min_size=4, max_size=4), st.sampled_from(MASKS), st.booleans())
def test_positions_of_any_size(places: list[int], text: str, as_tensor: bool) -> None:
    x = np.random.default_rng(0).normal(size=(4, 4))
    array = np.array(places)  # int64, uint64, or floats where no integer dtype has them all
    if array.dtype.kind == "u":
        array = array.astype(np.uint64)  # NumPy gives ulonglong here, which torch cannot take
    given_places = torch.from_numpy(array) if as_tensor else array
    q = torch.from_numpy(x) if as_tensor else x
    try:
        found = attention(q, q, q, text, q_positions=given_places, k_positions=given_places)
    except CallError:
        assert max(places) >= END or array.dtype.kind not in "iu"
        return
    mask = lowtri.mask(text)
    truth = np.array([[q >= 0 and k >= 0 and mask(q, k) for k in places] for q in places])
    assert near(found, attention(x, x, x, lowtri.table(truth), engine="reference"), "float64")
