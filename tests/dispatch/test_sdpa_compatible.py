"""lowtri.scaled_dot_product_attention against torch's, argument by argument: the same numbers, the same refusals."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from attention_cases import near
from subprocesses import printed
from torch.nn.attention.bias import causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs

from lowtri import CallError
from lowtri import scaled_dot_product_attention as ours
from lowtri.dispatch import sdpa_compatible

FRONTS = {2: (), 3: (4,), 4: (3, 4), 5: (2, 3, 4)}  # the dimensions before (L, E)
LENGTHS = [(6, 6), (4, 7), (7, 4), (1, 7), (6, 1)]


def draw(front, nq, nk, *, kv_front=None, e=8, ev=8, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    kv_front = front if kv_front is None else kv_front
    shapes = (*front, nq, e), (*kv_front, nk, e), (*kv_front, nk, ev)
    return [torch.randn(shape, generator=source).to(dtype) for shape in shapes]


def mask_shapes(front, nq, nk):
    """Every shape that broadcasts to (*front, L, S), of two dimensions or more."""
    whole = (*front, nq, nk)
    for rank in range(2, len(whole) + 1):
        yield from itertools.product(*((n, 1) if n > 1 else (1,) for n in whole[-rank:]))


def compare(*args, **kwargs):
    """Output and gradients of both, equal to rounding."""
    answers = []
    for attend in (torchs, ours):
        leaves = [x.clone().requires_grad_() for x in args]
        chosen = dict(kwargs)
        given = chosen.get("attn_mask")
        if given is not None and given.is_floating_point():
            chosen["attn_mask"] = given.clone().requires_grad_()
            leaves.append(chosen["attn_mask"])
        out = attend(*leaves[:3], **chosen)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
        answers.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    pairs = answers[0][0][..., 0].numel() * args[1].shape[-2]
    for name, t, o in zip(("output", "query", "key", "value", "attn_mask"), *answers, strict=False):
        assert t.shape == o.shape and t.dtype == o.dtype, name
        # A number of a mask that is broadcast is added to many scores, so its gradient is a sum of as many terms.
        terms = max(32, pairs // max(t.numel(), 1)) if name == "attn_mask" else 32
        assert near(o, t, str(t.dtype).removeprefix("torch."), times=terms), (name, kwargs)


@pytest.mark.parametrize(("nq", "nk"), LENGTHS)
@pytest.mark.parametrize("rank", FRONTS)
def test_without_a_mask_and_causal(rank, nq, nk):
    for is_causal, scale, ev in itertools.product((False, True), (None, 0.3), (8, 5)):
        compare(*draw(FRONTS[rank], nq, nk, ev=ev), is_causal=is_causal, scale=scale)


@pytest.mark.parametrize(("nq", "nk"), LENGTHS)
@pytest.mark.parametrize("rank", FRONTS)
def test_masks_of_every_shape(rank, nq, nk):
    """bools and numbers, every broadcastable shape."""
    q, k, v = draw(FRONTS[rank], nq, nk)
    tried = 0
    for shape in mask_shapes(FRONTS[rank], nq, nk):
        source = torch.Generator().manual_seed(len(shape))
        bools = torch.rand(shape, generator=source) < 0.6
        bools[..., 0] = True  # each query sees a key: what torch does otherwise depends on the road
        compare(q, k, v, attn_mask=bools)
        compare(q, k, v, attn_mask=torch.randn(shape, generator=source))
        compare(q, k, v, attn_mask=torch.zeros(shape).masked_fill(~bools, -math.inf))
        tried += 1
    assert tried >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype):
    q, k, v = draw((2, 3), 9, 9, dtype=dtype)
    for mask in (None, torch.ones(9, 9, dtype=torch.bool).tril(), torch.randn(9, 9).to(dtype), torch.randn(3, 1, 9)):
        answers = [attend(q, k, v, attn_mask=mask) for attend in (torchs, ours)]
        assert answers[0].dtype == answers[1].dtype == dtype
        assert near(answers[1], answers[0], str(dtype).removeprefix("torch."), times=16)


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize(("hq", "hkv"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_grouped_heads(rank, hq, hkv):
    front = FRONTS[rank][:-1]
    inputs = draw((*front, hq), 5, 7, kv_front=(*front, hkv))
    for is_causal in (False, True):
        compare(*inputs, enable_gqa=True, is_causal=is_causal)
    for shape in ((5, 7), (hq, 1, 7), (hq, 5, 7)):
        compare(*inputs, enable_gqa=True, attn_mask=torch.randn(shape, generator=torch.Generator().manual_seed(1)))


BROADCAST = [((2, 3), (2, 1)), ((2, 3), (1, 3)), ((2, 3), (1, 1)), ((2, 1), (2, 3)), ((2, 3), (3,)), ((3,), (2, 3))]


@pytest.mark.parametrize(("front", "kv_front"), [*BROADCAST, ((), (2, 3)), ((2, 3), ())])
def test_dimensions_in_front_broadcast(front, kv_front):
    inputs = draw(front, 5, 7, kv_front=kv_front, ev=4)
    compare(*inputs)
    compare(*inputs, is_causal=True)
    compare(*inputs, attn_mask=torch.randn(5, 7))
    q, k, v = inputs
    compare(q, k, v[..., :1, :, :] if v.ndim > 2 else v)


def test_dropout():
    q, k, v = torch.zeros(1, 2, 64, 4), torch.zeros(1, 2, 64, 4), torch.ones(1, 2, 64, 1)
    torch.manual_seed(0)
    out = ours(q, k, v, dropout_p=0.5)
    assert abs(out.mean() - 1) < 0.1 and 0.05 < out.std() < 0.25  # 1 / sqrt(64) of spread
    for p in (0.0, 1.0):
        assert torch.equal(ours(q, k, v, dropout_p=p), torchs(q, k, v, dropout_p=p))


EMPTY = [sizes for sizes in itertools.product((0, 2), (0, 3), (0, 5), (0, 7), (0, 8), (0, 4)) if 0 in sizes]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"scale": 2.0}, "bools", "numbers"])
def test_empty(options):
    """Every combination of sizes that are 0: torch's shape, dtype and gradients."""
    for batch, heads, nq, nk, e, ev in EMPTY:
        for front, dtype in (((batch, heads), torch.float32), ((heads,), torch.bfloat16)):
            kwargs = options
            if isinstance(options, str):
                bools = torch.ones(nq, nk, dtype=torch.bool)
                kwargs = {"attn_mask": bools if options == "bools" else bools.to(dtype)}
            inputs = [x.requires_grad_() for x in draw(front, nq, nk, e=e, ev=ev, dtype=dtype)]
            found, expected = (f(*inputs, **kwargs) for f in (ours, torchs))
            grads = [torch.autograd.grad(x.sum(), inputs, materialize_grads=True) for x in (found, expected)]
            for one, other in zip((found, *grads[0]), (expected, *grads[1]), strict=True):
                assert one.shape == other.shape and one.dtype == dtype
                assert near(one.detach(), other.detach().nan_to_num(), str(dtype).removeprefix("torch."))


def test_the_signature_is_torchs():
    """By place: query, key, value, attn_mask, dropout_p, is_causal; the others by name."""
    q, k, v = draw((2, 3), 5, 5)
    assert near(ours(q, k, v, None, 0.0, True), torchs(q, k, v, None, 0.0, True), "float32")
    named = dict(zip(("query", "key", "value"), (q, k, v), strict=True))
    assert near(ours(**named, is_causal=True, scale=0.5), torchs(**named, is_causal=True, scale=0.5), "float32")


Q, K, V = draw((2, 3), 5, 7)
BOOLS = torch.ones(5, 7, dtype=torch.bool)
ANOTHER_CAUSAL = {"attn_mask": causal_upper_left(5, 7), "is_causal": True}
NO_HEADS = {"query": Q[0, 0], "key": K[0, 0], "value": V[0, 0], "enable_gqa": True}
REFUSED = {  # what torch refuses, as changes of a call with Q, K and V -> our words
    "whole numbers": ({"attn_mask": BOOLS.int()}, r"attn_mask is int32, but it takes bools \(True = attend\)"),
    "one dimension of mask": (
        {"attn_mask": BOOLS[:, 0]},
        r"attn_mask is \(5,\), which does not broadcast to \(2, 3, 5, 7\)",
    ),
    "another causal mask": (
        ANOTHER_CAUSAL,
        "attn_mask is a CausalBias, and is_causal=True another one. Fix: one of them",
    ),
    "no dimension of mask": ({"attn_mask": BOOLS[0, 0]}, r"attn_mask is \(\), which does not broadcast"),
    "turned mask": ({"attn_mask": BOOLS.T}, r"attn_mask is \(7, 5\), which does not broadcast to"),
    "too many dimensions": ({"attn_mask": BOOLS[None, None, None]}, r"attn_mask is \(1, 1, 1, 5, 7\), which does not"),
    "list as mask": ({"attn_mask": [[True]]}, "attn_mask is list, but it takes an array or a tensor"),
    "list as query": ({"query": [[1.0]]}, "query is list, but it takes an array or a tensor"),
    "one dimension": ({"key": K[0, 0, 0]}, r"key is \(8,\), but it takes an array or a tensor of at least two"),
    "other head size": ({"key": K[..., :4]}, "q and k differ in head size D"),
    "other dtype": ({"key": K.double()}, "q is float32 and k is float64"),
    "whole numbers as query": (
        {"query": Q.int(), "key": K.int(), "value": V.int()},
        "q is int32, but attention takes float16",
    ),
    "batches": (
        {"key": K[[0, 0, 0]], "value": V[[0, 0, 0]]},
        r"the leading dimensions do not broadcast: query \(2, 3, 5, 8\), key \(3,",
    ),
    "heads": ({"key": K[:, :2], "value": V[:, :2]}, r"the heads do not broadcast: .*Fix: enable_gqa=True"),
    "heads in no groups": (
        {"key": K[:, :2], "value": V[:, :2], "enable_gqa": True},
        "serves a whole number of query heads",
    ),
    "groups without heads": (NO_HEADS, "enable_gqa=True, but where are the heads"),
    "dropout above 1": ({"dropout_p": 1.5}, "dropout is 1.5, but it is a probability"),
    "dropout below 0": ({"dropout_p": -0.5}, "dropout is -0.5, but it is a probability"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(case):
    changes, words = REFUSED[case]
    arguments = {"query": Q, "key": K, "value": V, **changes}
    with pytest.raises(CallError, match=words) as caught:
        ours(**arguments)
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises((RuntimeError, TypeError, IndexError, ValueError)):
        torchs(**arguments)


@pytest.mark.parametrize(("nq", "nk"), LENGTHS)
@pytest.mark.parametrize("rank", FRONTS)
def test_a_mask_and_is_causal_are_joined(rank, nq, nk):
    """From the first key on, as torch's fused CPU kernel has it; its formula, which ours is compared with, raises."""
    inputs = draw(FRONTS[rank], nq, nk)
    triangle = torch.ones(nq, nk, dtype=torch.bool).tril()
    for shape in ((nk,), *mask_shapes(FRONTS[rank], nq, nk)):
        source = torch.Generator().manual_seed(len(shape))
        bools = torch.rand(shape, generator=source) < 0.6
        bools[..., 0] = True
        added = torch.randn(shape, generator=source)
        for mask, joined in (
            (bools, bools & triangle),
            (added, added.expand(torch.broadcast_shapes(shape, (nq, nk))).masked_fill(~triangle, -math.inf)),
        ):
            leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
            found, expected = ours(*leaves[0], attn_mask=mask, is_causal=True), torchs(*leaves[1], attn_mask=joined)
            assert near(found, expected, "float32")
            grads = [torch.autograd.grad(out.sum(), x) for out, x in zip((found, expected), leaves, strict=True)]
            assert all(near(one, other, "float32", times=32) for one, other in zip(*grads, strict=True))
            arrays = [x.numpy() for x in (*inputs, mask)]
            assert near(torch.from_numpy(ours(*arrays, is_causal=True)), expected, "float32")


def test_a_mask_and_is_causal_in_a_compiled_program():
    compiled = torch.compile(lambda *x: ours(*x, is_causal=True), backend="eager", fullgraph=True)
    for mask in (BOOLS, BOOLS[:1], BOOLS.float()):
        assert near(compiled(Q, K, V, mask), ours(Q, K, V, mask, is_causal=True), "float32")


def test_a_mask_of_keys_is_no_table_of_pairs(monkeypatch):
    """(S,), (1, 1, 1, S) and (B, 1, 1, S): what a call keeps of it grows with the keys alone."""
    monkeypatch.setattr(sdpa_compatible, "table", None)
    q, k, v = draw((2, 3), 300, 300)
    shown = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    shown[:, 0] = True
    for mask in (shown[0], shown[0][None], shown[:1, None, None], shown[:, None, None]):
        for is_causal in (False, True):
            whole = mask.expand(2, 3, 300, 300)
            whole = whole & torch.ones(300, 300, dtype=torch.bool).tril() if is_causal else whole
            expected = torchs(q, k, v, attn_mask=whole)
            assert near(ours(q, k, v, attn_mask=mask, is_causal=is_causal), expected, "float32")


NUMBERS = ["causal", "window", "padding", "each head", "causal and bias"]


def numbers_of(kind, n, hidden):
    """A table of numbers of which ``hidden`` hides."""
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    source = torch.Generator().manual_seed(2)
    visible = {
        "causal": causal,
        "window": causal.triu(-20),
        "padding": torch.arange(n) < torch.tensor([n // 2, n])[:, None, None, None],
        "each head": (torch.rand(1, 4, n, n, generator=source) < 0.5) | torch.eye(n, dtype=torch.bool),
        "causal and bias": causal,
    }[kind]
    bias = torch.randn(n, n, generator=source) if kind == "causal and bias" else torch.zeros(())
    return torch.where(visible, bias, hidden), visible


@pytest.mark.parametrize("n", [40, 160])
@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min], ids=["inf", "lowest"])
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_that_hide(kind, hidden, n):
    """Numbers of 0 and -inf, or the lowest number, hide as torch has it; where they are read as a mask, they are the table of bools."""
    q, k, v = draw((2, 4), n, n)
    numbers, visible = numbers_of(kind, n, hidden)
    compare(q, k, v, attn_mask=numbers)
    joined = numbers.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
    assert near(ours(q, k, v, numbers, is_causal=True), torchs(q, k, v, joined), "float32")
    if n == 160 and kind != "causal and bias":
        expected = ours(q, k, v, attn_mask=visible)
        assert torch.equal(ours(q, k, v, attn_mask=numbers), expected)
        assert np.array_equal(ours(q.numpy(), k.numpy(), v.numpy(), numbers.numpy()), expected.numpy())
        if hidden == -math.inf:
            for dtype in (np.float16, np.float64):
                found = ours(q.numpy(), k.numpy(), v.numpy(), numbers.numpy().astype(dtype))
                assert np.array_equal(found, expected.numpy())


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_that_differ_are_taken_where_torch_takes_them(autocast):
    """Of attn_mask, and of query, key and value. A half or single attn_mask of float64 queries is right under autocast, too."""
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        for dtypes in [(a, a, a, b) for a in FLOATS for b in (*FLOATS, torch.bool)] + [
            (*three, None) for three in itertools.product(FLOATS, repeat=3)
        ]:
            inputs = [x.to(dtype) for x, dtype in zip(draw((2,), 5, 5), dtypes[:3], strict=True)]
            if dtypes[3] is not None:
                inputs.append((torch.arange(25).reshape(5, 5) % 7).to(dtypes[3]))
            try:
                expected = torchs(*inputs)
            except RuntimeError:
                if autocast is None or dtypes[0] != torch.float64 or dtypes[3] is None:
                    with pytest.raises(CallError):
                        ours(*inputs)
                continue
            found = ours(*inputs)
            assert found.dtype == expected.dtype and near(
                found, expected, str(found.dtype).removeprefix("torch."), times=16
            )


@pytest.mark.parametrize("compiles", [False, True])
def test_a_table_of_another_dtype_is_refused_with_the_fix(compiles):
    q, k, v = draw((2, 3), 5, 5)
    torch._dynamo.reset()
    call = torch.compile(ours, backend="eager") if compiles else ours
    with pytest.raises(CallError) as told:
        call(q, k, v, torch.zeros(5, 5, dtype=torch.float64))
    assert str(told.value) == (
        "scaled_dot_product_attention: attn_mask is torch.float64 and query torch.float32, "
        "but numbers to add are float32 or query's dtype. Fix: attn_mask.to(query.dtype)."
    )
    assert call(q, k, v, torch.zeros(5, 5, dtype=torch.float64).to(q.dtype)).shape == q.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 1, 40, 40), (2, 1, 1, 40), (2, 1, 160, 160)])
def test_a_row_of_the_lowest_number_gives_the_mean(shape, dtype):
    """As in torch, where a score that is added to it is lost; of -inf alone, 0."""
    n = shape[-1]
    q, k, v = draw((2, 3), n, n, dtype=dtype)
    numbers = torch.zeros(shape, dtype=dtype)
    numbers[..., n // 2 :] = torch.finfo(dtype).min
    numbers[1, :, :20] = torch.finfo(dtype).min  # rows of padding
    numbers[1, :, :20, 5:9] = -math.inf
    found, expected = ours(q, k, v, attn_mask=numbers), torchs(q, k, v, attn_mask=numbers)
    assert near(found, expected, str(dtype).removeprefix("torch."))
    if dtype != torch.float16:  # whose lowest number leaves something of the scores
        seen = [*range(5), *range(9, n)]
        assert near(found[1, :, 0], v[1, :, seen].float().mean(1).to(dtype), str(dtype).removeprefix("torch."))
    hidden = numbers.masked_fill(numbers != 0, -math.inf)
    assert not ours(q, k, v, attn_mask=hidden)[1, :, :20].any()


def test_gradients_of_a_row_of_the_lowest_number():
    """The log-sum-exp of such a row must not lose how many keys it has."""
    q, k, v = (x.double() for x in draw((2, 3), 160, 160))
    future = torch.ones(160, 160, dtype=torch.bool).triu(1)
    numbers = torch.zeros(2, 1, 160, 160, dtype=torch.float64).masked_fill(future, torch.finfo(torch.float64).min)
    numbers[1, :, :20] = torch.finfo(torch.float64).min
    compare(q, k, v, attn_mask=numbers)


def test_hidden_numbers_leave_no_trace():
    """A key that a large table hides from all queries may hold anything."""
    q, k, v = draw((1, 2), 160, 160)
    for hidden in (-math.inf, torch.finfo(torch.float32).min):
        numbers = torch.zeros(160, 160)
        numbers[:, 100:] = hidden
        expected = ours(q, k, v, attn_mask=numbers)
        k[..., 100:, :], v[..., 100:, :] = torch.nan, torch.inf
        assert torch.equal(ours(q, k, v, attn_mask=numbers), expected) and expected.isfinite().all()
        k, v = k.nan_to_num(0), v.nan_to_num(0, 0, 0)


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min], ids=["inf", "lowest"])
def test_numbers_of_keys_need_no_memory_for_pairs(hidden):
    """Padding of 4,096 keys: 16 thousand numbers of a mask, and not the 16 million of all pairs."""
    q, k, v = draw((1, 1), 4096, 4096)
    numbers = torch.zeros(1, 1, 1, 4096)
    numbers[..., 4000:] = hidden
    tracemalloc.start()
    found = ours(q, k, v, attn_mask=numbers)
    assert tracemalloc.get_traced_memory()[1] < 2**21
    tracemalloc.stop()
    assert near(found, torchs(q, k, v, attn_mask=numbers), "float32")


def test_masks_are_read_at_every_call():
    """Also where they change through memory that they share with NumPy, which torch's counter of changes does not see."""
    small, large = torch.zeros(70, 70), torch.zeros(160, 160)
    for mask in (small == 0, small[0] == 0, small, large == 0, large):
        n = mask.shape[-1]
        q, k, v = draw((1, 2), n, n)
        before = ours(q, k, v, attn_mask=mask)
        mask.numpy()[..., 20:] = False if mask.dtype == torch.bool else -math.inf
        after = ours(q, k, v, attn_mask=mask)
        assert not torch.equal(before, after)
        assert near(after, torchs(q, k, v, attn_mask=mask.expand(n, n)), "float32")


@pytest.mark.sweep
def test_in_torch_s_own_place():
    """Put where torch's function is, before and after lowtri has loaded torch's: it never calls itself."""
    program = """
import torch, lowtri
import torch.nn.functional as F
torchs = F.scaled_dot_product_attention
F.scaled_dot_product_attention = lowtri.scaled_dot_product_attention
q = torch.randn(1, 2, 9, 8)
assert torch.allclose(F.scaled_dot_product_attention(q, q, q, is_causal=True), torchs(q, q, q, is_causal=True), atol=1e-5)
layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).train()
layer(q[0]).sum().backward()
"""
    printed("-W", "error", "-c", program)


@pytest.mark.parametrize(
    "mask", [None, "causal", BOOLS[:, :5], torch.randn(5, 5)], ids=["none", "causal", "bools", "numbers"]
)
def test_a_head_size_of_0(mask):
    """Each score is an empty sum, 0."""
    q, v = Q[..., :0], torch.randn(2, 3, 5, 4)
    kwargs = {"is_causal": True} if isinstance(mask, str) else {"attn_mask": mask}
    compare(q, q, v, **kwargs)
    compare(q, q, v, scale=0.5, **kwargs)
    arrays = [None if x is None or isinstance(x, str) else x.numpy() for x in (q, q, v, mask)]
    found = ours(*arrays, is_causal=isinstance(mask, str))
    assert near(found, ours(q, q, v, **kwargs), "float32")
    with pytest.raises(CallError, match="differ in head size D"):
        ours(Q, q, v)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_once_for_all_lengths():
    """No size of a dynamic program is looked into, but for what broadcasting and grouping ask."""
    for kwargs in ({}, {"is_causal": True}, {"enable_gqa": True}, {"attn_mask": True}, {"scale": 0.3}):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()

        def step(q, k, v, kwargs=kwargs):
            chosen = dict(kwargs)
            if "attn_mask" in chosen:
                chosen["attn_mask"] = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            return ours(q, k, v, **chosen)

        program = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
        for b, nq, nk in ((3, 9, 10), (5, 11, 13), (7, 17, 19)):  # equal sizes would share a symbol
            q, k, v = draw((b, 4), nq, nk, kv_front=(b, 2) if "enable_gqa" in kwargs else None)
            assert near(program(q, k, v), step(q, k, v), "float32"), kwargs
        assert counter.frame_count == 1, kwargs


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
def test_arrays_that_attention_takes_are_passed_on_as_they_are(monkeypatch, kind, options):
    q, k, v = draw((2, 4), 5, 5, kv_front=(2, 2) if "enable_gqa" in options else None)
    if kind == "numpy":
        q, k, v = (x.numpy() for x in (q, k, v))
    passed = []
    real = sdpa_compatible.attention
    monkeypatch.setattr(sdpa_compatible, "attention", lambda *args, **more: passed.append(args) or real(*args, **more))
    output = ours(q, k, v, **options)
    assert passed[0][0] is q and passed[0][1] is k and passed[0][2] is v
    general = ours(q[:, None], k[:, None], v[:, None], **options)  # five dimensions, which are broadcast
    assert passed[1][0] is not q
    assert np.array_equal(output, general[:, 0])


NOT_AS_THEY_ARE = {
    "broadcast heads": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "broadcast rows": lambda q, k, v: (q[:1], k, v),
    "three dimensions": lambda q, k, v: (q[0], k[0], v[0]),
    "a negated view": lambda q, k, v: (torch.complex(q, -q).conj().imag, k, v),
    "zeros without memory": lambda q, k, v: (q, k, torch._efficientzerotensor(v.shape)),
}


@pytest.mark.parametrize("name", NOT_AS_THEY_ARE)
def test_other_arrays(name):
    arrays = NOT_AS_THEY_ARE[name](*draw((2, 4), 5, 5))
    in_memory = [torch.zeros(x.shape) if x._is_zerotensor() else x for x in arrays]  # torch's own function reads others
    torch.testing.assert_close(ours(*arrays), torchs(*in_memory), atol=1e-5, rtol=0)
