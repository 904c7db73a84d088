"""A call with the signature of an earlier one runs as that one was prepared; another call must never be mistaken for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import lowtri
from lowtri.dispatch import prepared
from lowtri.dispatch.prepared import PREPARED, CallCache, find

CAUSAL = lowtri.causal()


@pytest.fixture(autouse=True)
def _nothing_prepared():
    PREPARED.clear()
    yield
    PREPARED.clear()


def cache(seed: int = 0, *, heads: int = 4, kv_heads: int = 2, nq: int = 1, nk: int = 300, d: int = 32, dv: int = 32):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, nq, d), (kv_heads, nk, d), (kv_heads, nk, dv))
    return [torch.randn(2, *size, generator=generator) for size in sizes]


@pytest.fixture
def made(monkeypatch) -> list[object]:
    """The calls that were checked and prepared, as it happens."""
    calls: list[object] = []
    real = prepared.prepare

    def prepare(call, engine):
        calls.append(call)
        return real(call, engine)

    monkeypatch.setattr(prepared, "prepare", prepare)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"nq": 3, "dv": 64}, {"heads": 2, "nk": 1}, {"nq": 40}], ids=str)
@pytest.mark.parametrize("engine", ["cpu", "sdpa", "formula"])
def test_other_arrays_give_what_they_would_have_given_alone(made, dtype, sizes, engine) -> None:
    calls = [[x.to(dtype) for x in cache(seed, **sizes)] for seed in range(4)]
    mask, alone = lowtri.full(), []
    for call in calls:
        PREPARED.clear()
        alone.append(lowtri.attention(*call, mask, engine=engine))
    made.clear()
    for call, output in zip(calls, alone, strict=True):
        assert torch.equal(lowtri.attention(*call, mask, engine=engine), output)
    assert made == []


def is_found(*arrays: object, mask: object = CAUSAL) -> bool:
    """Whether the call is looked up, and not checked."""
    return find(*arrays, None, None, None, mask, None, None, 0.0, False, False, "auto", False)[0] is not None


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("nq", [1, 40])
def test_equal_calls_are_found_and_have_the_same_bits(nq: int, gradients: bool) -> None:
    calls = [[x.requires_grad_(gradients) for x in cache(seed, nq=nq)] for seed in range(3)]
    assert not is_found(*calls[0])
    first = lowtri.attention(*calls[0], CAUSAL)
    assert all(is_found(*call) for call in calls)
    assert is_found(*calls[0], mask=lowtri.causal()) and not is_found(*calls[0], mask="causal")
    assert torch.equal(lowtri.attention(*calls[0], CAUSAL), first)
    for call in calls:
        output = lowtri.attention(*call, CAUSAL)
        gradients_of = torch.autograd.grad(output.sum(), call) if gradients else ()
        PREPARED.clear()
        alone = lowtri.attention(*call, CAUSAL)
        assert torch.equal(output, alone) and output.stride() == alone.stride()
        again = torch.autograd.grad(alone.sum(), call) if gradients else ()
        assert all(torch.equal(one, other) for one, other in zip(gradients_of, again, strict=True))


class _Subclass(torch.Tensor):
    pass


class _Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _under(context):
    def find(q, k, v):
        with context():
            return is_found(q, k, v)

    return find


def _traced(q, k, v):
    found = []
    torch.jit.trace(lambda x: found.append(is_found(q, k, v)) or x + 1, torch.ones(1), check_trace=False)
    return found[0]


def _mapped(q, k, v):
    found = []
    torch.vmap(lambda x: found.append(is_found(q, k, v)) or x + 1)(torch.ones(2))
    return found[0]


UNUSUAL = {
    "a parameter that needs a gradient": lambda q, k, v: is_found(torch.nn.Parameter(q), k, v),
    "a subclass": lambda q, k, v: is_found(q.as_subclass(_Subclass), k, v),
    "NumPy's arrays": lambda q, k, v: is_found(q.numpy(), k.numpy(), v.numpy()),
    "a negated query": lambda q, k, v: is_found(torch._neg_view(q), k, v),
    "negated keys": lambda q, k, v: is_found(q, torch._neg_view(k), v),
    "negated values": lambda q, k, v: is_found(q, k, torch._neg_view(v)),
    "zeros without memory": lambda q, k, v: is_found(q, k, torch._efficientzerotensor(v.shape)),
    "a sparse tensor": lambda q, k, v: is_found(q, k.to_sparse(), v),
    "another device": lambda q, k, v: is_found(q.to("meta"), k.to("meta"), v.to("meta")),
    "another dtype": lambda q, k, v: is_found(q, k.double(), v),
    "other heads": lambda q, k, v: is_found(q, k[:, :1], v[:, :1]),
    "other head sizes": lambda q, k, v: is_found(q, k[..., :16], v),
    "unequal lengths": lambda q, k, v: is_found(q, k, v[:, :, 1:]),
    "no keys": lambda q, k, v: is_found(q, k[:, :, :0], v[:, :, :0]),
    "a gradient": lambda q, k, v: is_found(q, k, v.clone().requires_grad_()),
    "a mask that has no hash": lambda q, k, v: is_found(q, k, v, mask=[]),
    "autocast": _under(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "a dispatch mode": _under(_Mode),
    "forward mode": _under(torch.autograd.forward_ad.dual_level),
    "a trace": _traced,
    "vmap": _mapped,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_a_kept_call_cannot_serve_is_not_found(name: str) -> None:
    q, k, v = cache()
    lowtri.attention(q, k, v, CAUSAL)
    assert is_found(q, k, v) and not UNUSUAL[name](q, k, v)


def test_calls_with_other_arrays_are_found_and_read_those_of_each_call(made) -> None:
    q, k, v = cache(nq=20)
    for name in ("sinks", "bias", "q_positions"):
        values = {
            "sinks": [torch.full((4,), x) for x in (0.0, 2.0)],
            "bias": [x * torch.arange(300.0) for x in (0.0, 0.1)],
            "q_positions": [np.arange(20) + x for x in (0, 100)],
        }[name]
        before = len(made)
        for value in (*values, *values):
            output = lowtri.attention(q, k, v, CAUSAL, engine="cpu", **{name: value})
            right = lowtri.attention(q, k, v, CAUSAL, engine="formula", **{name: value})
            torch.testing.assert_close(output, right, atol=1e-5, rtol=0)
        assert len(made) - before == (4 if name == "q_positions" else 2)  # positions by their content


def test_growing_caches_of_two_layers_are_prepared_once(made) -> None:
    narrow, wide = cache(nk=400), cache(1, nk=400, d=64, dv=64)
    for nk in range(100, 400):
        for q, k, v in (narrow, wide):
            output = lowtri.attention(q, k[:, :, :nk], v[:, :, :nk], CAUSAL, engine="cpu")
            assert output.shape == (*q.shape[:3], v.shape[3])
    assert len(made) == 2 and len(PREPARED) == 2


def test_autocast_is_not_mistaken_for_the_call_without_it() -> None:
    call = cache()
    plain = lowtri.attention(*call, CAUSAL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halves = [lowtri.attention(*call, CAUSAL) for _ in range(3)]
    assert {x.dtype for x in halves} == {torch.bfloat16}
    assert torch.equal(halves[0], lowtri.attention(*(x.bfloat16() for x in call), CAUSAL))
    assert torch.equal(lowtri.attention(*call, CAUSAL), plain)
    with torch.autocast("cpu", dtype=torch.float16):
        assert lowtri.attention(*call, CAUSAL).dtype == torch.float16


OTHERS = {
    "scale": lambda q, k, v: ((q, k, v, CAUSAL), {"scale": 0.5}),
    "softcap": lambda q, k, v: ((q, k, v, CAUSAL), {"softcap": 3.0}),
    "bias": lambda q, k, v: ((q, k, v, CAUSAL), {"bias": torch.linspace(-1, 1, 300)}),
    "sinks": lambda q, k, v: ((q, k, v, CAUSAL), {"sinks": torch.linspace(-1, 1, 4)}),
    "positions": lambda q, k, v: ((q, k, v, CAUSAL), {"q_positions": [5]}),
    "array positions": lambda q, k, v: ((q, k, v, CAUSAL), {"q_positions": np.array([7])}),
    "tensor positions": lambda q, k, v: ((q, k, v, CAUSAL), {"q_positions": torch.tensor([9])}),
    "returns": lambda q, k, v: ((q, k, v, CAUSAL), {"return_lse": True}),
    "mask": lambda q, k, v: ((q, k, v, lowtri.window(20)), {}),
    "strides of k": lambda q, k, v: ((q, k.transpose(1, 2).contiguous().transpose(1, 2), v, CAUSAL), {}),
    "strides of v": lambda q, k, v: ((q, k, v.transpose(1, 2).contiguous().transpose(1, 2), CAUSAL), {}),
    "length": lambda q, k, v: ((q, k[:, :, 1:], v[:, :, 1:], CAUSAL), {}),
    "dtype": lambda q, k, v: ((q.double(), k.double(), v.double(), CAUSAL), {}),
    "rank": lambda q, k, v: ((q[0], k[0], v[0], CAUSAL), {}),
    "library": lambda q, k, v: ((q.numpy(), k.numpy(), v.numpy(), CAUSAL), {}),
}


POSITIONS = "positions", "array positions", "tensor positions"


@pytest.mark.parametrize("engine", ["cpu", "formula", "auto"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_prepared_anew(made, name: str, engine: str) -> None:
    q, k, v = cache()
    lowtri.attention(q, k, v, CAUSAL, engine=engine)
    made.clear()
    arrays, options = OTHERS[name](q, k, v)
    output = lowtri.attention(*arrays, engine=engine, **options)
    right = lowtri.attention(*arrays, engine="reference", **options)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (output, right)), strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), atol=1e-5, rtol=0)
    # One call of the kernel for few queries serves other keys and positions, too.
    same = engine != "formula" and name in ("strides of k", "strides of v", "length", *POSITIONS)
    assert len(made) == (1 if same else 2)


def test_wrong_arguments_raise_after_a_right_call() -> None:
    q, k, v = cache()
    for _ in range(2):
        lowtri.attention(q, k, v, CAUSAL)
    wrong = {"scale": float("nan"), "softcap": -1.0, "dropout": 2.0, "bias": torch.zeros(301), "sinks": torch.zeros(3)}
    for name, value in wrong.items():
        with pytest.raises(lowtri.CallError, match=name):
            lowtri.attention(q, k, v, CAUSAL, **{name: value})
    with pytest.raises(lowtri.CallError, match="head size"):
        lowtri.attention(q, k[..., :16], v, CAUSAL)
    with pytest.raises(lowtri.EngineError, match="there is no engine 'cp'"):
        lowtri.attention(q, k, v, CAUSAL, engine="cp")
    assert len(PREPARED) == 1


def test_positions_are_compared_by_content(made) -> None:
    q, k, v = cache(nq=2)
    positions = np.array([10, 20])
    for at in range(3):
        positions[1] = 20 + 100 * at  # the same array, changed in place
        output = lowtri.attention(q, k, v, CAUSAL, q_positions=positions)
        right = lowtri.attention(q, k, v, CAUSAL, q_positions=positions.tolist(), engine="reference")
        torch.testing.assert_close(output, right, atol=1e-5, rtol=0)
    lowtri.attention(q, k, v, CAUSAL, q_positions=positions.copy())
    # The reference three times, and the kernel once for all.
    assert len([call for call in made if call.positions_given]) == 4


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own attention under vmap
def test_gradients_and_transforms(made) -> None:
    q, k, v = cache()
    output = lowtri.attention(q, k, v, CAUSAL, engine="cpu")
    q.requires_grad_()
    for _ in range(2):
        (d_q,) = torch.autograd.grad(lowtri.attention(q, k, v, CAUSAL, engine="cpu").sum(), q)
        assert d_q.abs().sum() > 0
    with torch.no_grad():
        assert not lowtri.attention(q, k, v, CAUSAL, engine="cpu").requires_grad
    assert len(made) == 2  # the last is the first again
    many = torch.vmap(lambda q, k, v: lowtri.attention(q[None], k[None], v[None], CAUSAL)[0])(q.detach(), k, v)
    torch.testing.assert_close(many, output, atol=1e-5, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lowtri.attention(q.detach(), k, v, CAUSAL).dtype == torch.bfloat16


KEYS = (1, 2, 255, 256, 257, 700, 3, 64)  # also past a block of keys, where the work is divided otherwise


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "NumPy", "three dimensions"])
@pytest.mark.parametrize(
    "mask", ["causal", "causal & window(40)", "causal & (window(40) | first(2))", "full", "strided(3)"]
)
def test_one_call_of_few_queries_serves_any_number_of_keys(made, mask: str, kind: str) -> None:
    dtype = getattr(torch, kind, torch.float32)
    for nk in (*KEYS, *KEYS):
        q, k, v = (x.to(dtype) for x in cache(nk, nk=nk))
        if kind == "three dimensions":
            q, k, v = q[0], k[0], v[0]
        buffers = [torch.full((*x.shape[:-2], 800, x.shape[-1]), torch.nan, dtype=dtype) for x in (k, v)]
        for buffer, x in zip(buffers, (k, v), strict=True):
            buffer[..., :nk, :] = x
        views = [buffer[..., :nk, :] for buffer in buffers]  # past them lies what must never be read
        made.clear()
        for arrays in ((q, k, v), (q, *views)):
            arrays = [x.numpy() for x in arrays] if kind == "NumPy" else arrays
            output = torch.as_tensor(lowtri.attention(*arrays, mask, engine="cpu"))
            right = lowtri.attention(q.double(), k.double(), v.double(), mask, engine="reference")
            assert (output.double() - right).abs().max() <= (1e-5 if dtype is torch.float32 else 2e-2)
        assert len([call for call in made if call.dtype != "float64"]) <= (nk == KEYS[0])
    assert len([key for key in PREPARED.calls]) < 2 + len(KEYS)  # one, and those of the reference


def test_what_the_one_call_cannot_serve_is_prepared_once(made) -> None:
    q, k, v = cache()
    lowtri.attention(q, k, v, CAUSAL, q_positions=np.array([299]), k_positions=np.arange(300))
    made.clear()
    at = {"q_positions": np.array([299], np.int32), "k_positions": np.arange(300, dtype=np.int32)}
    for _ in range(4):
        lowtri.attention(q, k, v, CAUSAL, **at)
        lowtri.attention(q, k, v, lowtri.documents(lengths=[300]), engine="cpu")
    assert len(made) <= 3  # of the lengths, the first is the one call's


def test_positions_of_any_keys_are_checked_as_those_of_the_first(made) -> None:
    q, k, v = cache(nq=2)
    at = {"q_positions": [298, 299], "k_positions": np.arange(300)}
    for _ in range(2):
        lowtri.attention(q, k, v, CAUSAL, **at)
    for wrong in (np.arange(299), np.arange(300) + 2**62, np.arange(300) * 0.5):
        with pytest.raises(lowtri.CallError, match="k_positions"):
            lowtri.attention(q, k, v, CAUSAL, **at | {"k_positions": wrong})
    with pytest.raises(lowtri.MaskError, match="q_positions"):
        lowtri.attention(q, k[:, :, :1], v[:, :, :1], CAUSAL)
    with pytest.raises(lowtri.CallError, match="length Nk"):
        lowtri.attention(q, k, v[:, :, 1:], CAUSAL, **at)
    for given in (np.arange(300, dtype=np.int16), np.arange(300) - 7, torch.arange(300), range(300)):
        output = lowtri.attention(q, k, v, CAUSAL, **at | {"k_positions": given})
        right = lowtri.attention(q, k, v, CAUSAL, engine="reference", **at | {"k_positions": given})
        torch.testing.assert_close(output, right, atol=1e-5, rtol=0)
    rows = np.stack([np.arange(300), np.arange(300) - 40])  # -1 and below: no token
    rows_q = np.array([[298, 299], [-1, 259]])
    output = lowtri.attention(q, k, v, CAUSAL, q_positions=rows_q, k_positions=rows)
    right = lowtri.attention(q, k, v, CAUSAL, q_positions=rows_q, k_positions=rows, engine="reference")
    torch.testing.assert_close(output, right, atol=1e-5, rtol=0)


def test_rows_that_begin_at_an_odd_number_are_read_by_another_kernel() -> None:
    q, k, v = (x.bfloat16() for x in cache(nk=64))
    for apart in (32, 33, 32):  # numbers from row to row
        spaced = [torch.zeros(2, 2, 64, apart, dtype=torch.bfloat16)[..., :32].copy_(x) for x in (k, v)]
        output = lowtri.attention(q, *spaced, CAUSAL, engine="cpu")
        right = lowtri.attention(q.double(), k.double(), v.double(), CAUSAL, engine="reference")
        assert (output.double() - right).abs().max() <= 2e-2


@pytest.mark.parametrize("engine", ["cpu", "sdpa"])
def test_eight_threads_at_once(engine: str) -> None:
    calls = [cache(seed, nk=300 + seed % 3) for seed in range(8)]
    alone = [lowtri.attention(*call, CAUSAL, engine=engine) for call in calls]

    def work(number: int) -> bool:
        return all(
            torch.equal(lowtri.attention(*calls[number], CAUSAL, engine=engine), alone[number]) for _ in range(50)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_the_cache_is_bounded_in_number_and_in_bytes() -> None:
    q, k, v = cache()
    for scale in range(1, 300):
        lowtri.attention(q, k, v, CAUSAL, scale=scale / 100)
    assert len(PREPARED) == PREPARED.most

    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.prepared, self.nbytes = self, nbytes

    kept = CallCache(most=10, most_bytes=100)
    for number in range(8):
        kept.put(number, Sized(30))
        kept.put(number, Sized(90))  # another thread was first
        assert len(kept) <= 3
    assert list(kept.calls) == [5, 6, 7]
    kept.put("too large", Sized(101))
    assert list(kept.calls) == [5, 6, 7]


def test_the_call_that_has_waited_longest_is_evicted(monkeypatch) -> None:
    monkeypatch.setattr(PREPARED, "most", 3)
    calls = [cache(nk=nk, nq=20) for nk in (30, 40, 50, 60)]
    for call in calls[:3]:
        lowtri.attention(*call, CAUSAL)
    lowtri.attention(*calls[0], CAUSAL)
    lowtri.attention(*calls[3], CAUSAL)
    assert [is_found(*call) for call in calls] == [True, False, True, True]
