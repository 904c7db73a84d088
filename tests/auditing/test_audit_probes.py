"""Each probe against a fault that it alone is for, and against a right model."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from audited_models import decoder, tiny, vectors
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from torch import nn

import lowtri


def ids(*shape: int, size: int = 50) -> torch.Tensor:
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(0))


def status(model: Any, example: Any, probe: str, **arguments: Any) -> str:
    return lowtri.audit(model, example, probes=[probe], **arguments).finding(probe).status


def mean_over(table: np.ndarray) -> Any:
    """A model whose output at i is the mean of the inputs that a table shows it."""
    weights = table / np.maximum(table.sum(-1, keepdims=True), 1)
    return lambda x: weights[..., : x.shape[-2], : x.shape[-2]] @ x


# change


@pytest.mark.parametrize(
    "text",
    [
        "causal",
        "window(3)",
        "causal & window(3)",
        "causal | first(2)",
        "causal & documents(lengths=[4, 5])",
        "band(1, 2)",
        "chunks(4)",
        "causal & strided(2)",
        "full",
    ],
)
def test_any_declared_mask_is_kept_and_missed_exactly(text: str) -> None:
    table = np.array(lowtri.mask(text).dense(9))
    x = np.random.default_rng(0).standard_normal((9, 3))
    assert status(mean_over(table), x, "change", mask=text) == "clean"
    hidden = np.argwhere(~table)
    for query, key in hidden[:: max(1, len(hidden) // 4)]:
        wrong = table.copy()
        wrong[query, key] = True
        report = lowtri.audit(mean_over(wrong), x, mask=text, probes=["change"])
        assert [(leak.query, leak.key) for leak in report.leaks] == [(query, key)]


@settings(deadline=None, max_examples=40)
@given(arrays(bool, (6, 6)), arrays(bool, (6, 6)))
def test_leaks_and_unseen_pairs_are_the_two_differences(declared: np.ndarray, actual: np.ndarray) -> None:
    x = np.random.default_rng(0).standard_normal((6, 3))
    report = lowtri.audit(mean_over(actual), x, mask=declared, probes=["change", "sensitivity"])
    tokens = declared.any(axis=0) | declared.any(axis=1)  # what neither sees nor is seen is a pad
    leaks = {(int(q), int(k)) for q, k in np.argwhere(actual & ~declared) if tokens[q]}
    assert {(leak.query, leak.key) for leak in report.leaks} == leaks
    unseen = report.finding("sensitivity")
    count = int((declared & ~actual)[tokens].sum())
    assert (unseen.status == "warning") == (count > 0)
    assert count == 0 or unseen.measured["blind"] == count


def test_masks_that_differ_from_row_to_row() -> None:
    lengths = np.array([9, 6])
    mask = lowtri.causal() & lowtri.keys(np.arange(9) < lengths[:, None])
    table = np.array(mask.dense(9))
    x = np.random.default_rng(0).standard_normal((2, 9, 3))
    assert status(mean_over(table), x, "change", mask=mask) == "clean"
    report = lowtri.audit(mean_over(np.tril(np.ones((9, 9)))), x, mask=mask, probes=["change"])
    # In the second row the keys from 6 on are pads; their own outputs mean nothing, so nobody is left to see them.
    assert report.ok
    report = lowtri.audit(mean_over(np.ones((9, 9))), x, mask=mask, probes=["change"])
    assert {leak.row for leak in report.leaks} == {0, 1}


def test_layers_widen_the_mask() -> None:
    step = np.array(lowtri.mask("causal & window(3)").dense(12))
    two = (step.astype(int) @ step) > 0
    x = np.random.default_rng(0).standard_normal((12, 3))
    assert status(mean_over(two), x, "change", mask="causal & window(3)", layers=2) == "clean"
    first = lowtri.audit(mean_over(two), x, mask="causal & window(3)", probes=["change"]).first
    assert first is not None and (first.query, first.key) == (3, 0)
    three = (two.astype(int) @ step) > 0
    first = lowtri.audit(mean_over(three), x, mask="causal & window(3)", layers=2, probes=["change"]).first
    assert first is not None and (first.query, first.key) == (5, 0)


def test_long_inputs_are_bisected_to_the_pair() -> None:
    def model(x: np.ndarray) -> np.ndarray:
        out = np.cumsum(x, axis=0)
        out[599] += x[611]  # one query, one key, neither of them a round number
        return out

    x = np.random.default_rng(0).standard_normal((700, 2))
    report = lowtri.audit(model, x, probes=["change"], mask=lowtri.causal())
    assert not report.leaks  # a single pair in 245,000: the report says how little of them was looked at
    assert "48 keys and 48 queries looked at" in report.message

    def late(x: np.ndarray) -> np.ndarray:
        out = np.cumsum(x, axis=0)
        out[:650] += x[683]
        return out

    report = lowtri.audit(late, x, probes=["change"])
    assert report.first is not None and report.first.key == 683


def test_faults_at_the_masks_edge_are_looked_at_in_long_inputs() -> None:
    table = np.array(lowtri.mask("causal & window(101)").dense(400))
    x = np.random.default_rng(0).standard_normal((400, 2))
    report = lowtri.audit(mean_over(table), x, mask="causal & window(100)", probes=["change"])
    assert report.first is not None and report.first.query - report.first.key == 100


@pytest.mark.parametrize("back", [0, 1])
def test_a_leak_of_equality_shows_in_a_large_vocabulary(back: int) -> None:
    """Is the next token equal to mine, or to the one before mine? No random draw of 50,000 ids says yes."""
    table = np.random.default_rng(0).standard_normal((50_000, 3))

    def model(t: np.ndarray) -> np.ndarray:
        out = np.cumsum(table[t], axis=1)
        out[:, back:-1, 0] += t[:, back + 1 :] == t[:, : t.shape[1] - 1 - back]
        return out

    example = np.random.default_rng(0).integers(0, 50_000, (2, 16))
    report = lowtri.audit(lowtri.Model(model, vocab_size=50_000), example)
    assert {(leak.query, leak.key) for leak in report.leaks if leak.probe == "change"} == {
        (q, q + 1) for q in range(back, 15)
    }
    right = lowtri.audit(lowtri.Model(lambda t: np.cumsum(table[t], axis=1), vocab_size=50_000), example)
    assert right.ok and right.finding("change").message.endswith("4 draws and one extreme, one of its own ids)")


# gradient


def test_a_discrete_choice_has_no_gradient_and_is_caught_by_change() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        chosen = x.mean(-1) > x.mean(-1).mean(-1, keepdim=True)  # above the row's mean
        return x * chosen[..., None]

    report = lowtri.audit(model, vectors(4, 6, 3))
    assert report.finding("gradient").status == "clean"
    assert report.finding("change").status == "leak"


@pytest.mark.parametrize("look_up", ["embedding", "functional", "index"])
def test_gradients_reach_through_every_look_up(look_up: str) -> None:
    table = nn.Embedding(50, 4)

    def model(tokens: torch.Tensor) -> torch.Tensor:
        if look_up == "embedding":
            x = table(tokens)
        elif look_up == "functional":
            x = nn.functional.embedding(tokens, table.weight)
        else:
            x = table.weight[tokens]
        return x.cumsum(1) + 1e-12 * x.flip(1).cumsum(1)

    assert status(lowtri.Model(model, vocab_size=50), ids(2, 7), "gradient") in ("leak", "undecided")
    clean = lowtri.audit(lowtri.Model(lambda t: table(t).cumsum(1), vocab_size=50), ids(2, 7), probes=["gradient"])
    assert clean.finding("gradient").status == "clean"


def test_models_without_a_gradient_say_so() -> None:
    frozen = lowtri.audit(lambda x: x.detach().cumsum(0), vectors(5, 3), probes=["gradient"])
    assert frozen.finding("gradient").message == "the output carries no gradient"
    rounded = lowtri.audit(lambda x: x.cumsum(0).argmax(-1), vectors(5, 3), probes=["gradient"])
    assert rounded.finding("gradient").status == "skipped"


# prefix


def test_dependence_on_the_length() -> None:
    report = lowtri.audit(lambda x: np.cumsum(x, 0) / len(x), np.random.default_rng(0).standard_normal((8, 3)))
    assert [finding.probe for finding in report.findings if finding.status == "leak"] == ["prefix"]
    assert "position 0 sees the length: output 0 moves by" in report.message
    assert status(lambda x: np.cumsum(x, 0), np.ones((8, 3)), "prefix") == "clean"


def test_the_prefix_probe_skips_a_model_of_one_length() -> None:
    weights = np.tril(np.ones((8, 8)))
    report = lowtri.audit(lambda x: weights @ x, np.random.default_rng(0).standard_normal((8, 3)))
    assert report.ok and report.finding("prefix").message == "the model takes no shorter input"


# poison


def test_poison_is_a_warning_only() -> None:
    def zero_times_hidden(x: torch.Tensor) -> torch.Tensor:
        return torch.tril(torch.ones(x.shape[0], x.shape[0])) @ x

    report = lowtri.audit(zero_times_hidden, vectors(6, 3))
    assert report.ok and report.finding("poison").status == "warning"
    assert status(nn.GRU(4, 4, batch_first=True), vectors(2, 6, 4), "poison") == "clean"


# batch


def test_neighbours_in_the_batch() -> None:
    report = lowtri.audit(lambda x: x.cumsum(1) + 0.1 * x.mean(0), vectors(3, 6, 4), probes=["batch"])
    assert re.search(r"row \d sees row \d: when input 0 of row \d changes, output 0 of row \d moves by", report.message)
    assert status(lambda x: x.cumsum(1), vectors(1, 6, 4), "batch") == "clean"  # a batch of one is doubled
    assert status(lambda x: x.cumsum(0), vectors(6, 4), "batch") == "skipped"
    alone = lowtri.audit(lambda x: x.cumsum(1) / len(x), vectors(3, 6, 4), probes=["batch"])
    assert "row 0 has other outputs alone" in alone.message


# padding, packing


class Padded(nn.Module):
    def __init__(self, hides: bool = True) -> None:
        super().__init__()
        self.hides = hides

    def forward(self, x: torch.Tensor, key_padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        if key_padding_mask is None or not self.hides:
            return x + x.mean(1, keepdim=True)
        real = (~key_padding_mask)[..., None]
        return x + (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)


def test_padding_in_both_polarities() -> None:
    for hides, right in ((True, "clean"), (False, "leak")):
        model = lowtri.Model(Padded(hides=hides), pads="key_padding_mask")
        assert status(model, vectors(2, 6, 4), "padding", mask="full") == right


def test_our_decoder_and_its_packed_documents() -> None:
    model = decoder()
    mask = "causal & documents(lengths=[5, 6])"
    right = lowtri.audit(lowtri.Model(lambda t: model(t, mask=mask), alone=model, vocab_size=50), ids(2, 11), mask=mask)
    assert right.ok and right.finding("packing").status == "clean"
    wrong = lowtri.audit(lowtri.Model(model, alone=model, vocab_size=50), ids(2, 11), mask=mask)
    assert (wrong.first.query, wrong.first.key) == (5, 0)
    assert wrong.finding("packing").leaks[0].query == 5


# cache


@pytest.mark.parametrize("text", ["causal", "causal & window(4)", "causal & (window(3) | first(2))"])
def test_our_cache_past_the_windows_edge(text: str) -> None:
    report = lowtri.audit(decoder(mask=text), ids(2, 14), mask=text, layers=2)
    assert report.ok, report
    assert report.finding("cache").measured["ways"] == [
        "one at a time",
        "after a prompt",
        "in chunks",
        "after a rejected draft",
    ]


def test_a_step_that_forgets() -> None:
    cell = nn.GRUCell(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(4, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(x)[0]

        def step(self, state: Any, x: torch.Tensor) -> Any:
            y, state = self.gru(x[:, None], state)
            return y[:, 0], state

        def forgets(self, state: Any, x: torch.Tensor) -> Any:
            return self.step(None, x)

    assert cell is not None
    model = Model()
    assert status(lowtri.Model(model, step=model.step), vectors(2, 6, 4), "cache") == "clean"
    report = lowtri.audit(lowtri.Model(model, step=model.forgets), vectors(2, 6, 4), probes=["cache"])
    assert (report.first.query, report.first.key) == (1, 0)
    assert "from position 1 on" in report.message and "the two disagree whether it sees position 0" in report.message


def test_a_rounding_of_the_cache_is_not_followed_to_a_key() -> None:
    """In float32 a step is a few roundings off; the float64 copy decides that, and neither needs the key that it comes from."""
    calls = [0]

    class Summing(nn.Module):
        roundings = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).cumsum(1)

        def step(self, state: Any, x: torch.Tensor) -> Any:
            calls[0] += 1
            state = self.linear(x) + (0 if state is None else state)
            eps = torch.finfo(state.dtype).eps * self.roundings
            return state * (1 + eps), state

    def decodings(roundings: float) -> int:
        torch.manual_seed(0)
        model = Summing()
        model.roundings, calls[0] = roundings, 0
        report = lowtri.audit(lowtri.Model(model, step=model.step), vectors(2, 16, 4), probes="cache")
        assert report.ok and ("nothing beyond rounding" in report.finding("cache").message) == (roundings > 0)
        return calls[0]

    assert decodings(200.0) <= 2 * decodings(0.0)


def test_a_prefix_that_sees_ahead_is_decoded_after_a_prompt_that_holds_it() -> None:
    model = decoder(mask="causal | first(6)")
    report = lowtri.audit(model, ids(2, 16), mask="causal | first(6)", layers=2)
    assert report.ok, report
    assert report.finding("cache").measured["ways"] == ["after a prompt", "after a rejected draft"]
    # A prompt that ends within the prefix holds less than the mask shows: no way is left.
    short = lowtri.audit(model, ids(2, 8), mask="causal | first(6)", layers=2).finding("cache")
    assert short.status == "skipped"
    assert short.message.startswith(
        "the mask shows inputs that are not yet appended when decoding one at a time or after a"
    )


def test_a_step_in_its_own_precision_is_judged_by_the_position_where_it_forgets() -> None:
    model = decoder()

    def step(state: Any, x: torch.Tensor, most: int) -> Any:
        state = [*(state or []), x]
        return model(torch.stack(state[-most:], 1))[:, -1], state

    report = lowtri.audit(lowtri.Model(model, step=lambda state, x: step(state, x, 9)), ids(2, 14), probes=["cache"])
    assert report.first is not None and report.first.query == 9
    assert "from position 9 on" in report.message
    assert lowtri.audit(lowtri.Model(model, step=lambda state, x: step(state, x, 14)), ids(2, 14), probes=["cache"]).ok


def test_a_transformers_model_on_all_its_code_paths() -> None:
    model = tiny("Mistral", intermediate_size=48, num_key_value_heads=1, sliding_window=6)
    before = model.config._attn_implementation
    report = lowtri.audit(model, ids(2, 16, size=60), mask="causal & window(6)", layers=2, redraw=True)
    assert report.ok, report
    assert {"change", "gradient", "prefix", "batch", "padding", "cache"} <= {
        finding.probe for finding in report.findings if finding.status == "clean"
    }
    paths = [f.under.words for f in report.findings if f.condition == "code_paths" and f.status == "clean"]
    assert list(dict.fromkeys(paths))[:2] == ["with output_attentions=True", "with output_hidden_states=True"]
    assert report.measured_mask == "causal & window(6)"
    assert not any("sliding_window" in note for note in report.notes)
    assert model.config._attn_implementation == before
    short = lowtri.audit(model, ids(2, 5, size=60), probes=["change"])
    assert "5 positions do not go past the model's sliding_window of 6" in short.notes[0]


# code paths, sensitivity


class TwoCodePaths(nn.Module):
    def __init__(self, leaks: str) -> None:
        super().__init__()
        self.fault = leaks

    def forward(self, x: torch.Tensor, need_weights: bool = False) -> tuple[torch.Tensor, Any]:
        y = x.cumsum(1)
        if need_weights and self.fault == "leak":
            y = y + x.flip(1)
        if need_weights and self.fault == "other":
            y = 2 * y
        return y, None


def test_other_code_paths() -> None:
    for fault, said in (("same", "clean"), ("other", "warning")):
        report = lowtri.audit(TwoCodePaths(fault), vectors(2, 6, 4), conditions="code_paths")
        assert report.finding("code_paths").status == said
    report = lowtri.audit(TwoCodePaths("leak"), vectors(2, 6, 4))
    assert "with need_weights=True, position 0 sees position 5" in report.message
    assert lowtri.audit(TwoCodePaths("other"), vectors(2, 6, 4)).ok


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it loads its compiler
def test_compiled_on_request() -> None:
    report = lowtri.audit(nn.Linear(4, 4), vectors(2, 6, 4), conditions="eval,compiled")
    assert report.finding("change", "compiled").status == "clean" and report.ok


def test_a_window_one_too_small_is_a_warning() -> None:
    table = np.array(lowtri.mask("causal & window(3)").dense(8))
    report = lowtri.audit(mean_over(table), np.random.default_rng(0).standard_normal((8, 3)), mask="causal & window(4)")
    assert report.ok
    finding = report.finding("sensitivity")
    assert finding.status == "warning"
    assert finding.message.startswith("5 of 26 visible pairs are never seen: output 3 does not move with input 0")
    assert "it sees at most 3 back" in finding.message


# where


def test_the_first_module_is_named_with_its_path() -> None:
    class Mixer(nn.Module):
        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.inner, self.outer, self.leaks = nn.Linear(4, 4), nn.Linear(4, 4), leaks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            x = x.flip(1) if self.leaks else x.cumsum(1)  # between two modules: the mixer itself is to blame
            return self.outer(x)

    class Block(nn.Module):
        def __init__(self, leaks: bool) -> None:
            super().__init__()
            self.norm, self.mixer = nn.LayerNorm(4), Mixer(leaks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mixer(self.norm(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(leaks=number == 1) for number in range(3))
            self.head = nn.Linear(4, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    report = lowtri.audit(Model(), vectors(2, 6, 4))
    assert report.first is not None and report.first.module == "layers.1.mixer"
    assert report.message.split(". (")[0].endswith("First seen in layers.1.mixer")


# cost


@pytest.mark.sweep
def test_a_small_model_of_128_positions_takes_seconds() -> None:
    model = decoder(vocab_size=100, hidden_size=64, num_attention_heads=4)
    started = time.process_time()
    report = lowtri.audit(model, ids(2, 128, size=100))
    assert report.ok
    assert report.finding("change").measured["every_pair"]
    assert time.process_time() - started < 20  # CPU seconds of a loaded machine; about 4 on a quiet core
