"""Models of a user's own: requests that another probe answers, steps of two forms, causes, separators, clean output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audited_models import tiny, vectors
from cache_names import cache_name
from torch import Tensor, nn

import lowtri

V, D, N = 30, 8, 12
IDS = torch.randint(2, V, (2, N), generator=torch.Generator().manual_seed(0))
PACKED = "causal & documents(lengths=[5, 7])"


class Decoder(nn.Module):
    """A causal layer with a cache of its own; `sees_ahead` lets positions that come together see one another."""

    def __init__(self, *, sees_ahead: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, V)
        self.sees_ahead = sees_ahead

    def forward(self, ids: Tensor) -> Tensor:
        return self.attend(None, ids, ahead=False)[0]

    def attend(self, state: Any, ids: Tensor, *, ahead: bool) -> tuple[Tensor, Any]:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        n, m = q.shape[1], k.shape[1]
        visible = torch.ones(n, m, dtype=torch.bool)
        visible = visible if ahead else visible.tril(m - n)
        return self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)), (k, v)

    def step(self, state: Any, ids: Tensor) -> tuple[Tensor, Any]:
        return self.attend(state, ids[:, None] if ids.ndim == 1 else ids, ahead=self.sees_ahead)


# requests


class Translator(nn.Module):
    """An encoder-decoder whose keyword for the source's pads is `src_mask`."""

    def __init__(self, *, leaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.leaks = nn.Embedding(V, D), nn.Linear(D, V), leaks

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor) -> Tensor:
        marks = torch.ones_like(src_mask) if self.leaks else src_mask
        source = (self.embed(src) * marks[..., None]).sum(1, keepdim=True)
        return self.head(self.embed(tgt).cumsum(1) + source)


@pytest.mark.parametrize("leaks", [False, True])
def test_pads_that_are_the_sources_are_answered_by_its_probe(leaks: bool) -> None:
    real = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    example = {"src": IDS[:, :6], "tgt": IDS, "src_mask": real}
    model = lowtri.Model(Translator(leaks=leaks), inputs="tgt", pads="src_mask")
    report = lowtri.audit(model, example, conditions="eval")
    assert report.verdict == ("leak" if leaks else "no leak found"), report
    assert report.finding("padding").message == "src_mask marks the pads of the source"
    alone = lowtri.audit(model, example, probes="padding")
    assert alone.reason == "padding: pads= was requested and did not run: src_mask marks the pads of the source"


def test_a_padding_mask_that_the_example_could_pass_is_named() -> None:
    def call(ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return nn.functional.one_hot(ids, V).float().cumsum(1)

    report = lowtri.audit(call, IDS, probes="padding,change")
    message = 'the example passes no attention_mask; pass it, or pads="attention_mask"'
    assert report.finding("padding").message == message


def test_lowtris_own_refusal_under_a_condition_is_no_error_of_the_audit() -> None:
    from lowtri.integrations.transformers import switch

    model = switch(tiny("Llama", vocab_size=V, num_hidden_layers=1, intermediate_size=16, num_key_value_heads=1))
    packed = {"input_ids": IDS[:1], "position_ids": torch.tensor([[*range(5), *range(7)]])}
    report = lowtri.audit(model, packed, mask=PACKED, probes="change", conditions="eval,code_paths")
    assert report.ok, report
    skipped = [result for result in report.findings if result.under.attention == "eager"]
    assert [result.status for result in skipped] == ["skipped"]
    assert skipped[0].message.startswith("EngineError: transformers: ") and "made no mask" in skipped[0].message


def test_a_condition_that_ran_alone_is_named_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)  # which takes seconds
    report = lowtri.audit(Decoder().eval(), IDS, probes="change", conditions="compiled")
    assert " positions with torch.compile, " in report.message, report.message
    both = lowtri.audit(Decoder().eval(), IDS, probes="change", conditions="eval,compiled")
    assert " positions in eval mode and with torch.compile, " in both.message, both.message


# caches


def test_a_step_that_is_right_one_at_a_time_and_wrong_in_chunks_says_so() -> None:
    right, wrong = Decoder(), Decoder(sees_ahead=True)
    said = {}
    for model in (right, wrong):
        report = lowtri.audit(lowtri.Model(model, step=model.step), IDS, probes="cache")
        assert report.ok, report
        said[model] = report.finding("cache").message
    assert said[right] == "cached decoding equals the whole forward (one at a time, after a prompt, in chunks)"
    assert said[wrong].startswith("cached decoding equals the whole forward (one at a time; with several positions at")


def test_a_prompt_that_sees_ahead_is_told_by_the_key_ahead() -> None:
    model, ahead = Decoder(), Decoder(sees_ahead=True)
    wrong = lowtri.Model(model, step=model.step, prefill=lambda ids: ahead.step(None, ids))
    message = lowtri.audit(wrong, IDS, probes="cache").message
    assert "decoding after a prompt differs from the whole forward from position 0 on" in message
    assert "the two disagree whether it sees position 1" in message


@pytest.mark.parametrize("shift", [0.0, 3e-5])
def test_a_prefill_in_its_own_precision_is_not_judged_in_float64(shift: float) -> None:
    model, other = Decoder(), Decoder()
    with torch.no_grad():
        other.head.bias += shift  # near the noise
    given = lowtri.Model(model, step=model.step, prefill=lambda ids: other.step(None, ids))
    report = lowtri.audit(given, IDS, probes="cache")
    if shift:
        assert report.verdict == "could not decide" and "prefill= keeps its own precision" in str(report.reason)
    else:
        assert report.ok, report


def test_the_warning_of_one_decoder_takes_back_no_leak_of_another() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    cache = cache_name(transformers.LlamaForCausalLM(config))

    class CountsFromOne(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
            begin = more[cache].get_seq_length() if more.get(cache) is not None else 0
            if position_ids is None and begin:
                position_ids = torch.arange(begin, begin + input_ids.shape[1])[None] - 1
            return super().forward(input_ids=input_ids, position_ids=position_ids, **more)

    model = CountsFromOne(config).eval()

    def step(state: Any, ids: Tensor, *, keeps: int) -> tuple[Tensor, Tensor]:
        ids = ids[:, None] if ids.ndim == 1 else ids
        seen = ids if state is None else torch.cat([state, ids], 1)[:, -keeps:]
        return model(seen).logits[:, -ids.shape[1] :], seen

    def audited(keeps: int) -> lowtri.AuditReport:
        given = lowtri.Model(model, step=lambda state, ids: step(state, ids, keeps=keeps))
        return lowtri.audit(given, IDS, probes="cache")

    right, wrong = audited(N), audited(6)
    assert right.ok and "unless position_ids are passed" in right.finding("cache").message, right
    assert "decoding with step=" in wrong.message and wrong.first is not None and wrong.first.query > 3, wrong


# leaks that float64 alone shows


class TinyLeak(nn.Module):
    """The other row's fifth input, or the length, moves each output by little."""

    def __init__(self, *, of_rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.of_rows = nn.Embedding(V, D), nn.Linear(D, D), of_rows

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        more = x.roll(1, 0)[:, 5:6, :1] if self.of_rows else ids.shape[1]
        return self.head(x).cumsum(1) + (1e-7 if self.of_rows else 1e-5) * more


@pytest.mark.parametrize("of_rows", [False, True])
def test_a_leak_below_rounding_is_located_in_float64_and_its_noise_is_that_of_float64(of_rows: bool) -> None:
    report = lowtri.audit(TinyLeak(of_rows=of_rows), IDS, probes="prefix,batch")
    words = "when input 5 of row " if of_rows else "position 0 sees the length"
    assert words in report.message and " in float64)" in report.message, report.message


@pytest.mark.parametrize("keeps", [N, 8])
def test_rounding_of_half_precision_hides_no_cache_that_forgets(keeps: int) -> None:
    model = Decoder().to(torch.bfloat16)

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids)

        def step(self, state: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
            ids = ids[:, None] if ids.ndim == 1 else ids
            seen = ids if state is None else torch.cat([state, ids], 1)[:, -keeps:]
            return self.model(seen)[:, -ids.shape[1] :], seen

    stepping = Stepping()
    report = lowtri.audit(lowtri.Model(stepping, step=stepping.step), IDS, probes="cache")
    assert report.ok == (keeps == N), report
    if keeps < N:
        assert "in float64)" in report.message and "sees position " in report.message


# rows of unequal lengths


class SortedByLength(nn.Module):
    """A recurrent network on rows that are packed by their lengths, in the order of the batch, or of the lengths."""

    def __init__(self, *, in_order: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.in_order = nn.Embedding(V, D), nn.LSTM(D, D, batch_first=True), in_order

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        rows = nn.utils.rnn.pack_padded_sequence(self.embed(ids)[order], lengths[order], batch_first=True)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(rows)[0], batch_first=True, total_length=ids.shape[1])
        return y[order.argsort()] if self.in_order else y


@pytest.mark.parametrize("lengths", [(7, 12), (7, 9)])
def test_the_longer_example_is_of_a_row_in_which_the_mask_has_no_pads(lengths: tuple[int, int]) -> None:
    """The lengths of the longer example say that all of it is real; the mask's keys would go on to hide some of it."""
    example = {"ids": IDS, "lengths": torch.tensor(lengths)}
    mask = lowtri.causal() & lowtri.keys(np.arange(N) < np.array(lengths)[:, None])
    report = lowtri.audit(SortedByLength(in_order=True), example, mask=mask)
    assert report.ok, report
    longer = report.finding("change", "longer") if max(lengths) == N else report.finding("longer")
    assert longer.status == ("clean" if max(lengths) == N else "skipped"), longer
    wrong = lowtri.audit(SortedByLength(in_order=False), example, mask=mask, probes="batch")
    assert "row " in wrong.message and wrong.verdict == "leak", wrong


# documents that end at a token


class EndsAtOne(nn.Module):
    """Documents end at token 1; or they do not, and this token is seen by all."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.apart = nn.Embedding(V, D), nn.Linear(D, 3 * D), apart

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        n, ends = ids.shape[1], ids == 1
        document = ends.cumsum(1) - ends.long()
        near = (
            document[:, :, None] == document[:, None]
            if self.apart
            else ends[:, None] | torch.ones(n, n).triu(-2).bool()
        )
        visible = near & torch.ones(n, n, dtype=torch.bool).tril()
        return x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def test_infer_mask_names_documents_that_end_at_a_token_of_the_example() -> None:
    same, apart = IDS.clone(), IDS.clone()
    same[:, 4], apart[0, 4], apart[1, 7] = 1, 1, 1
    model = EndsAtOne(apart=True)
    assert lowtri.infer_mask(model, same).text == PACKED
    assert lowtri.infer_mask(model, same, labels=[0] * 5 + [1] * 7).text == PACKED
    rows = "row 0: causal & documents(lengths=[5, 7]); row 1: causal & documents(lengths=[8, 4])"
    assert lowtri.infer_mask(model, apart).text == rows
    assert lowtri.audit(model, same, mask=PACKED, probes="change").measured_mask == PACKED
    # A token that all may see parts no documents.
    assert lowtri.infer_mask(EndsAtOne(apart=False), same).text == "no formula of three parts"


# the command, and pytest


def test_what_the_file_and_the_model_print_is_not_in_the_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from lowtri.cli.main import main

    file = tmp_path / "prints.py"
    file.write_text(
        "import numpy as np\nprint('loaded')\n"
        "def make():\n    def model(x):\n        print('called')\n        return np.cumsum(x, 1)\n"
        "    return model, np.ones((2, 6, 3))\n"
    )
    assert main(["audit", f"{file}:make", "--conditions", "eval", "--json"]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["ok"] and {"loaded", "called"} <= set(shown.err.split())
    assert main(["audit", f"{file}:make", "--infer"]) == 0
    shown = capfd.readouterr()
    assert shown.out.strip() == "causal" and "called" in shown.err


def test_frames_of_pythons_library_are_not_the_users(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from lowtri.cli.main import main

    file = tmp_path / "raises.py"
    file.write_text("import numpy as np\ndef make():\n    return (lambda x: 1 / 0), np.ones((2, 6, 3))\n")
    assert main(["audit", f"{file}:make", "--traceback"]) == 2
    frames = [line for line in capfd.readouterr().err.splitlines() if line.startswith("  ")]
    assert frames == [f"  {file}:3 in <lambda>: return (lambda x: 1 / 0), np.ones((2, 6, 3))"]


def test_a_model_that_raises_shows_none_of_lowtris_frames() -> None:
    def raises_for_others(x: np.ndarray) -> np.ndarray:
        if np.abs(x).max() > 5:
            raise LookupError("too large")
        return np.cumsum(x, axis=1)

    with pytest.raises(lowtri.CallError, match="LookupError: too large, in the probe change") as caught:
        lowtri.assert_causal(raises_for_others, vectors(2, 8, 3).numpy().clip(-1, 1))
    assert [entry.name for entry in caught.traceback if not entry.locals.get("__tracebackhide__")] == [
        "test_a_model_that_raises_shows_none_of_lowtris_frames"
    ]
