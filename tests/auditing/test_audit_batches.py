"""Padded batches, rows, caches and state: each fault is found and named, and its correct twin is clean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited_models import tiny, vectors
from cache_names import cache_name
from torch import Tensor, nn

import lowtri

B, N, D = 3, 10, 4


IDS = torch.randint(1, 30, (B, N), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1] * 10, [1] * 7 + [0] * 3, [1] * 5 + [0] * 5])
LEFT, INSIDE = RIGHT.flip(1), torch.tensor([[1] * 10, [1, 1, 0, 0, 1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]])


# what transformers makes of a padded batch


@pytest.mark.parametrize(
    ("name", "attention", "mask"),
    [
        ("Llama", "sdpa", RIGHT),
        ("Llama", "eager", LEFT),
        ("GPT2", "sdpa", LEFT),
        ("OPT", "eager", LEFT),
        ("Mistral", "sdpa", INSIDE),
        ("Mamba", "", RIGHT),
    ],
)
def test_an_ordinary_padded_batch_is_clean(name: str, attention: str, mask: Tensor) -> None:
    sizes = {
        "GPT2": {"max_position_embeddings": 32},
        "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
        "Mistral": {"intermediate_size": 32, "num_key_value_heads": 1, "sliding_window": 4},
        "Llama": {"intermediate_size": 32, "num_key_value_heads": 1},
        "Mamba": {"state_size": 4},
    }
    model = tiny(name, vocab_size=30, num_hidden_layers=1, **sizes[name])
    if attention:
        model.set_attn_implementation(attention)
    probes = ["change", "gradient", "prefix", "batch", "padding", "cache"]
    report = lowtri.audit(
        model, {"input_ids": IDS, "attention_mask": mask}, probes=probes, length=24, conditions="eval,longer"
    )
    assert report.ok, report
    assert report.finding("cache").status == "clean" and report.finding("longer").status == "clean", report


def test_pads_that_are_given_alone_to_a_convolution_accuse_nobody() -> None:
    """`generate` gives pads in the prompt only; LFM2's mixture has convolutions, and does not say that it has a state."""
    model = tiny(
        "Lfm2Moe", vocab_size=30, intermediate_size=16, moe_intermediate_size=8, num_key_value_heads=1, num_experts=2,
        num_experts_per_tok=1, num_dense_layers=1, layer_types=["conv", "full_attention"], bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    report = lowtri.audit(model, {"input_ids": IDS, "attention_mask": LEFT}, probes=["cache"], redraw=True)
    assert report.ok and "after a prompt" in report.finding("cache").measured["ways"], report


class Gated(nn.Module):
    """The mean of what came so far, without pads. `seen` says which of the pads it sees all the same."""

    def __init__(self, seen: Callable[[Tensor], Tensor], *, counted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.head = nn.Embedding(30, D), nn.Embedding(64, D), nn.Linear(D, 30)
        self.seen, self.counted = seen, counted

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = self.seen(attention_mask)
        places = attention_mask.cumsum(1) - 1 if self.counted else torch.arange(input_ids.shape[1])
        x = (self.embed(input_ids) + self.place(places.clamp(min=0))) * real[..., None]
        return self.head(x.cumsum(1) / real.cumsum(1).clamp(min=1)[..., None])


def interior(mask: Tensor) -> Tensor:
    """A gate that knows where each row ends, and not the pads before."""
    return (mask.flip(1).cummax(1).values.flip(1) * mask.cummax(1).values).float()


@pytest.mark.parametrize(("seen", "verdict"), [(interior, "leak"), (lambda mask: mask.float(), "no leak found")])
def test_pads_inside_the_callers_example(seen: Callable[[Tensor], Tensor], verdict: str) -> None:
    report = lowtri.audit(
        Gated(seen, counted=True), {"input_ids": IDS, "attention_mask": INSIDE}, conditions="eval,code_paths,longer"
    )
    assert report.verdict == verdict, report
    if report.first is not None:
        assert (report.first.row, report.first.query, report.first.key) == (2, 1 + 1, 1) or report.first.key in (
            1,
            2,
            3,
            7,
        )


@pytest.mark.parametrize(("counted", "verdict"), [(False, "leak"), (True, "no leak found")])
def test_positions_under_left_pads(counted: bool, verdict: str) -> None:
    example = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    report = lowtri.audit(
        Gated(lambda mask: mask.float(), counted=counted), example, length=0, conditions="eval,code_paths,longer"
    )
    assert report.verdict == verdict, report
    if report.first is not None:
        assert report.first.key == -1 and "pads on the left that are hidden from it" in report.message
        assert report.first.module == "place"


class PackedLSTM(nn.Module):
    """torch packs sequences with pads behind them only."""

    def __init__(self, *, both_ways: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm = nn.Embedding(30, D), nn.LSTM(D, D, batch_first=True, bidirectional=both_ways)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(input_ids), attention_mask.sum(1), batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], True, total_length=input_ids.shape[1])[0]


def test_pads_on_the_side_that_the_example_does_not_use_are_a_warning() -> None:
    example = {"input_ids": IDS, "attention_mask": RIGHT}
    report = lowtri.audit(PackedLSTM(both_ways=False), example, length=0, conditions="eval,code_paths,longer")
    assert report.ok and "left padding is not kept with attention_mask" in str(report), report
    assert (
        lowtri.audit(PackedLSTM(both_ways=True), example, length=0, conditions="eval,code_paths,longer").verdict
        == "leak"
    )
    shifted = Gated(lambda mask: mask.float())  # positions are counted from the pads
    for mask, verdict in ((RIGHT, "no leak found"), (LEFT, "leak"), (INSIDE, "leak")):
        report = lowtri.audit(shifted, {"input_ids": IDS, "attention_mask": mask}, probes=["padding"])
        assert report.verdict == verdict and "left" in report.finding("padding").message + str(report.first), report


def test_left_pads_of_a_transformers_model_without_position_ids_are_a_warning() -> None:
    """BART counts positions from the pads and takes no others, so that no call of it is right; GPT-2 is, with position_ids."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=30, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=32, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    example = {"input_ids": IDS, "attention_mask": LEFT}
    report = lowtri.audit(transformers.BartForCausalLM(config).eval(), example, probes=["change", "padding"])
    assert report.ok, report
    assert report.finding("padding").status == "warning" and "having pads moves real outputs" in str(report)


# rows


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(D, D, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


def capacity(x: Tensor, *, shared: bool) -> Tensor:
    """An expert for the tokens with a positive first feature, with room for the first four."""
    wanted = x[..., 0] > 0
    rank = wanted.flatten().cumsum(0).view(wanted.shape) if shared else wanted.cumsum(1)
    return x + 3.0 * x * (wanted & (rank <= 4))[..., None]


def prefix_block(x: Tensor, *, shared: bool) -> Tensor:
    """The first four positions are computed once, for all rows or for each."""
    y = x.cumsum(1)
    return torch.cat([(y[:1] if shared else y)[:, :4].expand(len(x), -1, -1), y[:, 4:]], 1)


ROWS: list[tuple[str, Callable[[bool], Any]]] = [
    ("gru", lambda wrong: Recurrent(batch_first=not wrong)),
    ("capacity", lambda wrong: lambda x: capacity(x, shared=wrong)),
    ("prefix block", lambda wrong: lambda x: prefix_block(x, shared=wrong)),
]


@pytest.mark.parametrize("make", [make for _, make in ROWS], ids=[name for name, _ in ROWS])
def test_rows_that_see_earlier_rows(make: Callable[[bool], Any]) -> None:
    x = vectors(B, N, D)
    report = lowtri.audit(make(True), x, probes=["change", "gradient", "prefix", "batch"])
    assert report.first is not None, report
    assert {leak.probe for leak in report.leaks} == {"batch"}, report  # and not a leak in time
    assert report.first.row > 0 and re.search(
        rf"row {report.first.row} (sees row \d|has other outputs alone)", report.message
    )
    assert report.first.module in (None, "gru", "Recurrent")
    right = lowtri.audit(make(False), x, probes=["change", "gradient", "prefix", "batch"])
    assert right.ok, right


def test_a_batch_of_one_is_tried_as_three_rows() -> None:
    report = lowtri.audit(Recurrent(batch_first=False), vectors(1, N, D), probes=["batch"])
    assert report.first is not None and report.first.row > 0


# caches


class Convolution(nn.Module):
    """A causal convolution of three taps, and a step with its state: the last two inputs."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.conv, self.fault = nn.Embedding(30, D), nn.Conv1d(D, D, 3, groups=D), fault

    def forward(self, ids: Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        y, state = self.step(past_key_values, ids)
        return (y, state) if use_cache else y

    def step(self, state: Any, ids: Tensor) -> tuple[Tensor, Any]:
        one = ids.dim() == 1
        x = self.embed(ids[:, None] if one else ids)  # (B, n, D)
        before = x.new_zeros(len(x), 2, D) if state is None else state
        if self.fault == "ignored in chunks" and x.shape[1] > 1:
            before = torch.zeros_like(before)
        joined = torch.cat([before, x], 1)
        y = self.conv(joined.mT).mT
        kept = torch.cat([before, y], 1) if self.fault == "after the convolution" and x.shape[1] > 1 else joined
        if self.fault == "a slot dropped" and x.shape[1] > 1:
            kept = kept[:, :-1]
        return (y[:, 0] if one else y), kept[:, -2:]

    def prefill(self, ids: Tensor) -> tuple[Tensor, Any]:
        return self.step(None, ids)


@pytest.mark.parametrize("way", ["step", "prefill", "past_key_values"])
@pytest.mark.parametrize("fault", ["", "ignored in chunks", "after the convolution", "a slot dropped"])
def test_caches_that_go_wrong_when_several_tokens_are_appended(fault: str, way: str) -> None:
    model = Convolution(fault)
    if way == "past_key_values":
        more: dict[str, Any] = {}
    else:
        more = {"step": model.step} | ({"prefill": model.prefill} if way == "prefill" else {})
    report = lowtri.audit(lowtri.Model(model, **more), IDS, probes=["cache"])
    if not fault or (way == "prefill" and fault == "ignored in chunks" and not report.leaks):
        named = [""] if way == "past_key_values" else ["with step=, ", "with its own cache, "]
        tried = {name + words for name in named for words in ("one at a time", "after a prompt")}
        assert report.ok and tried <= set(report.finding("cache").measured["ways"]), report
        return
    assert report.verdict == "leak" and "decoding" in report.message, report


def test_a_step_of_one_position_is_given_no_more() -> None:
    class Summing(Convolution):
        def step(
            self, state: Any, ids: Tensor
        ) -> tuple[Tensor, Any]:  # broadcasts where several come, and is wrong then
            state = self.embed(ids) + (0 if state is None else state)
            return state, state

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).cumsum(1)

    model = Summing()
    report = lowtri.audit(lowtri.Model(model, step=model.step), IDS, probes=["cache"])
    assert report.ok and report.finding("cache").measured["ways"] == ["one at a time"], report


def test_a_cache_leak_names_the_module() -> None:
    report = lowtri.audit(Convolution("after the convolution"), IDS, probes=["cache"])
    assert report.first is not None and report.first.module == "conv", report


# state


class Keeping(nn.Module):
    """Keeps something between calls, as `fault` says."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.fault = nn.Embedding(30, D), nn.Identity(), fault
        self.kept: Any = None
        self.base = 100.0

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embed(ids), ids.shape[1]
        if self.fault == "rotary" and n > 2 * N:
            self.base = 1000.0  # for good
        x = x * torch.cos(torch.arange(n) / self.base)[:, None]
        y = x.cumsum(1)
        if self.fault == "not reset":
            y = y + (0 if self.kept is None else self.kept[:1, None])
            self.kept = y[:, -1].detach()
        if self.fault == "prefix key":  # the sum of the first half, by its first token alone
            self.kept = self.kept or {}
            key = (int(ids[0, 0]), tuple(ids.shape))
            first = self.kept.setdefault(key, y[:, : n // 2].detach().clone())
            y = torch.cat([first, y[:, n // 2 :]], 1)
        return self.inner(y)


@pytest.mark.parametrize("fault", ["", "rotary", "not reset", "prefix key"])
def test_state_that_survives_from_one_call_to_the_next(fault: str) -> None:
    report = lowtri.audit(Keeping(fault), IDS, probes=["change", "prefix", "state"])
    if not fault:
        assert report.ok and len(report.finding("state").measured["histories"]) >= 5, report
        return
    assert report.verdict == "leak", report
    state = next(leak for leak in report.leaks if leak.probe == "state")
    assert state.module == "Keeping" and "keeps state between calls: after " in state.note


def test_a_picture_that_is_not_in_the_caches_key() -> None:
    class Seeing(Keeping):
        def forward(self, ids: Tensor, picture: Tensor) -> Tensor:  # type: ignore[override]
            if self.fault:
                self.kept = picture if self.kept is None else self.kept
                picture = self.kept
            return self.embed(ids).cumsum(1) + picture.mean(1, keepdim=True)

    example = {"ids": IDS, "picture": vectors(B, 5, D)}
    for fault in ("", "kept"):
        report = lowtri.audit(lowtri.Model(Seeing(fault), inputs="ids"), example, probes=["change", "state"])
        assert report.ok == (not fault), report
        assert report.ok or "after a call with another picture" in report.message


def test_random_numbers_of_the_models_own_are_no_state() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.calls = nn.Embedding(30, D), 0

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            return self.embed(ids).cumsum(1) * self.calls

    report = lowtri.audit(Noisy(), IDS)
    assert report.verdict == "could not decide" and "different outputs from run to run" in report.message


# masks and axes


@pytest.mark.parametrize(("last", "verdict"), [(1.0, "leak"), (0.0, "no leak found")])
def test_the_last_query_of_a_strict_mask(last: float, verdict: str) -> None:
    def model(x: Tensor) -> Tensor:
        y = x.cumsum(1) - x
        y[:, -1] += last * x[:, -1]
        return y

    report = lowtri.audit(model, vectors(2, N, D), mask="causal - window(1)", probes=["change"])
    assert report.verdict == verdict, report
    assert report.first is None or (report.first.query, report.first.key) == (N - 1, N - 1)


@pytest.mark.parametrize("leaks", [False, True])
def test_vectors_with_time_first_are_asked_back(leaks: bool) -> None:
    def model(x: Tensor) -> Tensor:
        return x.flip(0) if leaks else x.cumsum(0)

    x = vectors(24, 2, 16)
    with pytest.raises(lowtri.CallError, match=r"either 24 rows of 2 positions or 2 rows of 24(.|\n)*axes=.NBD"):
        lowtri.audit(model, x, probes=["change"])
    for axes in ("NBD", "NBD->NBD"):
        assert lowtri.audit(lowtri.Model(model, axes=axes), x, probes=["change"]).ok == (not leaks)
    assert lowtri.audit(lambda x: x.cumsum(1), x, probes=["change"]).ok  # rows are rows: nothing to ask


@pytest.mark.parametrize("name", ["Llama", "Mamba"])
def test_cached_decoding_is_fed_new_tokens_only(name: str) -> None:
    """A cache that is not passed on under the model's own name would let each call see its own tokens alone, or the whole row."""
    sizes = {"intermediate_size": 32, "num_key_value_heads": 1} if name == "Llama" else {"state_size": 4}
    model = tiny(name, vocab_size=30, num_hidden_layers=1, **sizes)
    calls: list[tuple[int, bool]] = []

    def note(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append((kwargs["input_ids"].shape[1], kwargs.get(cache_name(model)) is not None))

    model.register_forward_pre_hook(note, with_kwargs=True)
    report = lowtri.audit(model, {"input_ids": IDS}, probes=["cache"])
    assert report.finding("cache").status == "clean", report
    assert "one at a time" in report.finding("cache").measured["ways"]
    n = IDS.shape[1]
    alone = [(1, False), *[(1, True)] * (n - 1)]
    assert any(calls[start : start + n] == alone for start in range(len(calls)))
    assert (n // 2, False) in calls  # the prompt
