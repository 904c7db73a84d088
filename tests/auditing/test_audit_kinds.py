"""What an audit once read wrongly, each with a wrong model that is named and a right one that is not accused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from audited_models import decoder, tiny
from torch import Tensor, nn

import lowtri

V, D, N = 31, 16, 12
IDS = torch.randint(2, V, (3, N), generator=torch.Generator().manual_seed(0))
TRIANGLE = torch.ones(N, N, dtype=torch.bool).tril()


class Causal(nn.Module):
    """A right causal decoder of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.qkv, self.out = nn.Embedding(V, D), nn.Linear(D, 3 * D), nn.Linear(D, V)

    def hidden(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        n = x.shape[1]
        visible = torch.ones(n, n, dtype=torch.bool).tril() if visible is None else visible
        return x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    def forward(self, ids: Tensor, **more: Any) -> Tensor:
        return self.out(self.hidden(self.emb(ids)))


def line(report: lowtri.AuditReport, probe: str) -> tuple[str, str]:
    result = report.finding(probe)
    return result.status, result.message


# a key that the mask shows to nobody


class Forecaster(Causal):
    """Answers at twelve positions from the first eight; a wrong one reads the last four, too."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        if not self.wrong:
            x = torch.cat([x[:, :8], torch.zeros_like(x[:, 8:])], 1)
        return self.out(self.hidden(x, TRIANGLE & (self.wrong | (torch.arange(N) < 8))))


@pytest.mark.parametrize("mask", ["causal & first(8)", np.tril(np.ones((N, N), bool)) & (np.arange(N) < 8)], ids=str)
@pytest.mark.parametrize("wrong", [True, False])
def test_a_forecasters_horizon_is_compared(wrong: bool, mask: Any) -> None:
    report = lowtri.audit(Forecaster(wrong), IDS, mask=mask)
    assert report.verdict == ("leak" if wrong else "no leak found"), report
    if wrong:
        assert report.first is not None and report.first.query >= 8


def test_keys_and_padding_masks_are_pads() -> None:
    table = np.tril(np.ones((N, N), bool))
    table[:, :2] = table[:2] = False
    model = lambda ids: Causal()(ids) * (torch.arange(N) >= 2)[:, None] + Causal().emb(ids).sum(-1, keepdim=True)  # noqa: E731
    for mask in (lowtri.causal() & lowtri.keys([False] * 2 + [True] * 10), table):
        report = lowtri.audit(Wrapped(model), IDS, mask=mask, probes="change")
        assert {leak.query for leak in report.leaks} <= set(range(2, N)), report


class Wrapped(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, ids: Tensor) -> Tensor:
        return self.call(ids)


# numbers that belong to rows


class Lengths(Causal):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(
        self, ids: Tensor, lengths: Tensor, names: list[str] | None = None, scale: Tensor | None = None
    ) -> Tensor:
        assert names is None or len(names) == len(ids)
        assert scale is None or len(scale) == 3
        lengths = lengths[:1].expand(len(ids)) if self.wrong else lengths
        real = (torch.arange(ids.shape[1]) < lengths[:, None])[:, None, :]
        return self.out(self.hidden(self.emb(ids), torch.ones(ids.shape[1], ids.shape[1]).tril().bool() & real))


@pytest.mark.parametrize("more", [{}, {"names": ["a", "b", "c"]}], ids=str)
@pytest.mark.parametrize("wrong", [True, False])
def test_numbers_and_names_stay_with_their_rows(wrong: bool, more: dict[str, Any]) -> None:
    report = lowtri.audit(Lengths(wrong), {"ids": IDS, "lengths": torch.tensor([12, 9, 10]), **more})
    assert report.verdict == ("leak" if wrong else "no leak found"), report
    assert wrong or line(report, "batch") == ("clean", "a row does not depend on its neighbours")


def test_as_many_rows_as_positions() -> None:
    square = torch.randint(2, V, (N, N), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([12, 9, 10] * 4)
    assert lowtri.audit(Lengths(False), (square, lengths), probes="change,prefix,batch").ok
    assert not lowtri.audit(Lengths(True), (square, lengths), probes="change,prefix,batch").ok


def test_a_constant_of_the_batchs_size() -> None:
    report = lowtri.audit(Lengths(False), {"ids": IDS, "lengths": torch.tensor([12, 9, 10]), "scale": torch.ones(3)})
    assert report.verdict == "no leak found", report


def test_a_batch_that_never_runs_alone_is_said() -> None:
    def fixed(ids: Tensor) -> Tensor:
        if len(ids) != 3:
            raise ValueError("a batch of three")
        return nn.functional.one_hot(ids, V).double().cumsum(1)

    status, message = line(lowtri.audit(fixed, IDS, probes="batch"), "batch")
    assert status == "clean" and message.endswith("(no row runs alone)")


# the source's pads


class Translating(nn.Module):
    def __init__(self, hides: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.hides = nn.Embedding(V, D), hides

    def forward(self, src: Tensor, ids: Tensor, src_mask: Tensor) -> Tensor:
        real = src_mask[..., None].double() if self.hides else torch.ones(1, 1, 1, dtype=torch.double)
        source = self.emb(src).double() * real
        return self.emb(ids).double().cumsum(1) + (source.sum(1) / src_mask.sum(1, keepdim=True))[:, None]


@pytest.mark.parametrize("length", [7, N])
@pytest.mark.parametrize("hides", [True, False])
def test_the_sources_pads_are_examined(hides: bool, length: int) -> None:
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, 5:] = 0
    example = {"src": IDS[:, :length].flip(1), "ids": IDS, "src_mask": mask}
    report = lowtri.audit(lowtri.Model(Translating(hides), inputs="ids"), example)
    assert report.verdict == ("no leak found" if hides else "leak"), report
    assert hides or "pads behind the source" in report.message or "the source's pads" in report.message
    assert report.finding("source").status == ("clean" if hides else "leak")
    named = lowtri.Model(Translating(hides), inputs="ids", pads="src_mask")
    assert lowtri.audit(named, example, probes="source").ok == hides


# steps


def stepping(form: str, *, wrong: bool = False) -> tuple[Causal, Callable[[Any, Tensor], Any], Callable[[Tensor], Any]]:
    model = Causal()

    def step(state: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        if ids.ndim != (1 if form == "one" else 2) or (form == "column" and ids.shape[1] != 1):
            raise ValueError(f"not {form}: {tuple(ids.shape)}")
        new = ids[:, None] if form == "one" else ids
        seen = new if state is None else torch.cat([state[:, 1:] if wrong else state, new], 1)
        return model(seen)[:, -1:], seen

    def prefill(ids: Tensor) -> tuple[Tensor, Tensor]:
        return model(ids), ids

    return model, step, prefill


@pytest.mark.parametrize("form", ["one", "column"])
@pytest.mark.parametrize("prefilled", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_what_a_step_takes_is_found_out(form: str, prefilled: bool, wrong: bool) -> None:
    model, step, prefill = stepping(form, wrong=wrong)
    adapter = lowtri.Model(model, step=step, prefill=prefill if prefilled else None)
    report = lowtri.audit(adapter, IDS, probes="cache")
    assert report.verdict == ("leak" if wrong else "no leak found"), report
    ways = report.finding("cache").measured["ways"]
    assert ("after a prompt" in ways) == (prefilled and not wrong) or wrong


def test_both_the_step_and_the_models_own_cache_are_decoded_and_named() -> None:
    model = decoder(vocab_size=V)

    def step(state: Any, ids: Tensor, *, forgets: bool = False) -> tuple[Tensor, Tensor]:
        seen = ids[:, None] if state is None else torch.cat([state[:, forgets:], ids[:, None]], 1)
        return model(seen)[:, -1], seen

    right = lowtri.audit(lowtri.Model(model, step=step), IDS, probes="cache")
    assert {"with step=, one at a time", "with its own cache, in chunks"} <= set(
        right.finding("cache").measured["ways"]
    )
    wrong = lowtri.Model(model, step=lambda state, ids: step(state, ids, forgets=True))
    assert "decoding with step=, one at a time differs" in lowtri.audit(wrong, IDS, probes="cache").message


# tables, and rows that are padded on the left


def test_a_table_has_no_longer_example() -> None:
    mask = lowtri.table(TRIANGLE.numpy())
    report = lowtri.audit(Causal(), IDS, mask=mask)
    assert report.ok and report.finding("longer").status == "skipped"
    assert not lowtri.audit(lambda ids: Causal()(ids).flip(1), IDS, mask=mask).ok
    assert lowtri.audit(Causal(), IDS, mask=mask, length=20).verdict == "could not decide"


class Chunked(Causal):
    """Chunks of four, or another mask, counted from the first real token or from the first column."""

    def __init__(self, shown: Callable[[Tensor, Tensor], Tensor], from_token: bool) -> None:
        super().__init__()
        self.shown, self.from_token = shown, from_token

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        n = ids.shape[1]
        place = attention_mask.cumsum(1) - 1 if self.from_token else torch.arange(n).expand(len(ids), n)
        visible = self.shown(place[:, :, None], place[:, None]) & attention_mask.bool()[:, None]
        visible &= torch.ones(n, n, dtype=torch.bool).tril()
        return self.out(self.hidden(self.emb(ids), visible | torch.eye(n, dtype=torch.bool)))


SHOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal & chunks(4)": lambda q, k: q // 4 == k // 4,
    "causal & first(3)": lambda q, k: (k < 3) | (q == k),
    "causal & strided(3)": lambda q, k: (q - k) % 3 == 0,
}


@pytest.mark.parametrize("from_token", [True, False])
@pytest.mark.parametrize("mask", SHOWN)
def test_rows_padded_on_the_left(mask: str, from_token: bool) -> None:
    real = torch.ones(3, N, dtype=torch.long)
    real[1, :3] = 0
    declared = f"{mask} | band(0, 0)" if "first" in mask else mask
    right = lowtri.audit(
        Chunked(SHOWN[mask], from_token), {"ids": IDS, "attention_mask": real}, mask=declared, conditions="eval"
    )
    assert right.ok, right
    wrong = Chunked(lambda q, k: SHOWN[mask](q, k) | (q - k == 1), from_token)
    assert not lowtri.audit(wrong, {"ids": IDS, "attention_mask": real}, mask=declared, probes="change").ok


# nothing is left changed


calls: list[int] = []  # not the model's, so that it goes on counting


class Keeping(Causal):
    """Keeps a mean, a count, a list and a generator as plain attributes."""

    def __init__(self, stop: type[BaseException] | None = None) -> None:
        super().__init__()
        self.mean, self.count, self.log = torch.zeros(D), 0, [torch.zeros(1)]
        self.generator, self.numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.stop = stop

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        self.count += 1
        self.log.append(x.detach()[0, 0, :1])
        self.log[0] += 1
        torch.rand(1, generator=self.generator)
        self.numpy.random()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        torch.set_grad_enabled(self.count % 2 == 0)
        calls.append(1)
        if self.stop is not None and len(calls) > 40:
            raise self.stop("enough")
        return self.out(self.hidden(x - self.mean))

    def state(self) -> Any:
        draws = self.generator.get_state().tolist(), self.numpy.bit_generator.state["state"]
        plain = self.mean.tolist(), self.count, [value.tolist() for value in self.log], self.training
        return *draws, *plain, len(self._forward_hooks), torch.is_grad_enabled(), torch.get_num_threads()


@pytest.mark.parametrize("stop", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("training", [True, False])
def test_everything_is_put_back(stop: type[BaseException] | None, training: bool) -> None:
    model = Keeping(stop).train(training)
    calls.clear()
    before = model.state()
    if stop is None:
        lowtri.audit(model, IDS)
        lowtri.infer_mask(model, IDS)
    else:
        with pytest.raises((lowtri.CallError, KeyboardInterrupt)):
            lowtri.audit(model, IDS, probes="change", conditions="training")
    assert model.state() == before


# the cause that is named is the cause


class Stale(Causal):
    """Writes keys into a block that it never clears, and reads all of it: what a longer call wrote is still there."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.block, self.wrong = torch.zeros(3, 64, D), wrong

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        stale = self.block[: len(x)].sum((1, 2))[:, None, None] if self.wrong else 0.0
        self.block[: len(x), : x.shape[1]] = x.detach()
        return self.out(self.hidden(x) + 0.1 * stale)


def test_a_stale_block_is_state_and_no_pair() -> None:
    report = lowtri.audit(Stale(True), IDS)
    assert report.verdict == "leak" and "keeps state between calls" in report.message, report
    assert not any(leak.direct for leak in report.leaks), report
    assert lowtri.audit(Stale(False), IDS).ok


# documents that end at a token, and rows that end in different places


class EndsAt(Causal):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, ids: Tensor) -> Tensor:
        ends = (ids == 1).long()
        document = ends.cumsum(1) - ends
        same = document[:, :, None] == document[:, None]
        n = ids.shape[1]
        if self.wrong:
            same = same | (torch.arange(n)[:, None] - torch.arange(n) == 2)
        return self.out(self.hidden(self.emb(ids), torch.ones(n, n, dtype=torch.bool).tril() & same))


@pytest.mark.parametrize("wrong", [False, True])
def test_documents_that_end_at_a_token(wrong: bool) -> None:
    ids = IDS.clone()
    ids[:, 4] = 1
    report = lowtri.audit(EndsAt(wrong), ids, mask="causal & documents(lengths=[5, 7])")
    assert report.verdict == ("leak" if wrong else "no leak found"), report
    assert any("documents end at token 1" in note for note in report.notes)
    plain = lowtri.audit(Causal(), ids, mask="causal & documents(lengths=[5, 7])", probes="change")
    assert not plain.ok and (plain.first.query, plain.first.key) == (5, 0)
    assert not any("documents end" in note for note in plain.notes)


class Packed(Causal):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.pos, self.wrong = nn.Embedding(64, D), wrong

    def forward(self, ids: Tensor, doc: Tensor) -> Tensor:
        n = ids.shape[1]
        same = doc[:, :, None] == doc[:, None]
        i = torch.arange(n)
        start = torch.where(same, i, n).amin(-1)
        place = i.expand(len(ids), n) if self.wrong else i - start
        return self.out(self.hidden(self.emb(ids) + self.pos(place), torch.ones(n, n, dtype=torch.bool).tril() & same))


@pytest.mark.parametrize("wrong", [False, True])
def test_packed_rows_with_boundaries_of_their_own(wrong: bool) -> None:
    doc = torch.stack([torch.tensor([0] * a + [1] * (N - a)) for a in (5, 7, 4)])
    mask = lowtri.causal() & lowtri.documents(doc.numpy())
    report = lowtri.audit(Packed(wrong), {"ids": IDS, "doc": doc}, mask=mask)
    assert report.finding("packing").status == ("leak" if wrong else "clean"), report
    assert wrong or report.finding("packing").message.startswith("6 documents have")
    rows = [f"row {row}: causal & documents(lengths=[{a}, {N - a}])" for row, a in enumerate((5, 7, 4))]
    assert report.measured_mask == "; ".join(rows)


def test_packed_rows_of_transformers() -> None:
    model = tiny("Llama", intermediate_size=48)
    packed = {"input_ids": IDS, "position_ids": torch.tensor([*range(5), *range(7)]).expand(3, -1).contiguous()}
    mask = "causal & documents(lengths=[5, 7])"
    assert lowtri.infer_mask(model, packed).text == "causal"
    assert lowtri.infer_mask(model.train(), packed).text == "causal"
    model.eval()
    apart = packed | {"use_cache": False}
    assert lowtri.infer_mask(model, apart).text == mask
    wrong = lowtri.audit(model, packed, mask=mask, probes="change,cache")
    assert not wrong.ok and any("pass use_cache=False, in training too" in note for note in wrong.notes)
    right = lowtri.audit(model, apart, mask=mask, probes="change,cache")
    assert right.ok, right
    assert line(right, "cache") == (
        "skipped",
        "the example is packed, and the model's cache knows nothing of documents",
    )


def test_attention_of_lowtri_is_read() -> None:
    from lowtri.integrations.transformers import switch, use

    model = tiny("Llama", intermediate_size=48)
    switch(model)
    use(model, "causal & window(4)")
    inferred = lowtri.infer_mask(model, IDS)
    assert inferred.text == "causal & window(4)" and inferred.layers == ("causal & window(4)",) * 2
    assert lowtri.infer_mask(decoder(vocab_size=V, mask="causal & window(3)"), IDS).text == "causal & window(3)"


def test_examples_that_are_no_arrays_of_numbers() -> None:
    for example in (torch.eye(8).to_sparse(), np.array(["2026-01-01", "2026-01-02"], "datetime64[D]")):
        for check in (lowtri.audit, lowtri.infer_mask):
            with pytest.raises(lowtri.CallError, match=r"example is .*not an array of token ids or of vectors.\nFix: "):
                check(lambda x: x, example)


def test_the_frames_of_the_users_file_on_request(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from lowtri.cli.main import main

    file = tmp_path / "raises.py"
    file.write_text(
        "def make():\n    def model(x):\n        return x.no_such_thing()\n    return model, [[1.0], [2.0]]\n"
    )
    assert main(["audit", f"{file}:make"]) == 2
    plain = capsys.readouterr().err
    assert "AttributeError" in plain and "raises.py:3" not in plain
    assert main(["audit", f"{file}:make", "--traceback"]) == 2
    shown = capsys.readouterr().err
    assert f"{file}:3 in model: return x.no_such_thing()" in shown and "auditing" not in shown
    file.write_text("def make():\n    return 1 / 0\n")
    assert main(["audit", f"{file}:make"]) == 2
    assert "Fix: the line of the file that --traceback shows." in capsys.readouterr().err
    assert main(["audit", f"{file}:make", "--traceback"]) == 2
    assert f"{file}:2 in make: return 1 / 0" in capsys.readouterr().err


def test_our_decoder_is_asked_for_no_weights() -> None:
    report = lowtri.audit(decoder(vocab_size=V), IDS, conditions="code_paths")
    assert report.finding("code_paths").message == "no other code path is known"


def test_wide_outputs_are_compared_in_sums() -> None:
    table = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0))

    def model(ids: Tensor, size: float = 0.0) -> Tensor:
        rows = table[ids].cumsum(1)
        rows[:, :-1, 7] += size * ids[:, 1:]  # one number of five thousand
        return rows

    ids = IDS.clone()
    right = lowtri.audit(lowtri.Model(model, vocab_size=40), ids, probes="change,prefix,batch")
    assert right.ok and any("16 sums with random signs" in note for note in right.notes), right
    for size in (1.0, 1e-3):
        wrong = lowtri.Model(lambda ids, size=size: model(ids, size), vocab_size=40)
        report = lowtri.audit(wrong, ids, probes="change")
        assert report.verdict == "leak" and (report.first.query, report.first.key) == (0, 1), report


# a table of chunks is no packed row


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("form", ["table", "array", "formula"])
def test_a_table_of_chunks_is_decoded_with_the_models_cache(form: str, wrong: bool) -> None:
    n = 12
    place = np.arange(n)
    shown = (place[:, None] >= place) & (place[:, None] // 4 == place // 4)
    masks: dict[str, Any] = {"table": lowtri.table(shown), "array": shown, "formula": "causal & chunks(4)"}
    model = tiny("Llama", vocab_size=V, intermediate_size=16, num_hidden_layers=1)
    if not wrong:
        attend = model.model.layers[0].self_attn.forward

        def chunked(hidden_states: Tensor, **more: Any) -> Any:
            cache = more.get("cache", more.get("past_key_values"))  # the name from transformers 5.24 on, and before
            cached = 0 if cache is None else cache.get_seq_length()
            table = torch.tensor(shown[cached : cached + hidden_states.shape[1], : cached + hidden_states.shape[1]])
            return attend(hidden_states=hidden_states, **{**more, "attention_mask": table[None, None]})

        model.model.layers[0].self_attn.forward = chunked
    report = lowtri.audit(model, IDS, mask=masks[form], probes="change,packing,cache")
    assert report.ok != wrong, report
    assert report.finding("cache").status == "clean", report  # the wrong model's cache agrees with its forward pass
    assert report.finding("packing").status == "skipped"
