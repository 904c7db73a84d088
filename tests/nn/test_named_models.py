"""GPT-2, Whisper, T5 and BART of transformers on ``attn_implementation="lowtri"``, each as its family is used.

Decoder self-attention is masked; the encoder and cross-attention are not. Outputs, gradients and generated tokens are those of
transformers' eager attention, cached decoding is the whole forward, and the audit finds nothing. What registering can do in
general is in integrations/test_transformers.py; what these four are for is in test_what_was_asked.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rounding import with_rounding
from torch import Tensor

from demo.named_models import BOTH_SIDES, NAMES, SOURCE, TARGET, VOCABULARY, Named, made
from lowtri.integrations.transformers import register

ENGINES = {"auto": "lowtri", "formula": "lowtri-formula", "cpu": "lowtri-cpu"}
AUTO_FIRST = ["auto", *(pytest.param(engine, marks=pytest.mark.sweep) for engine in ("formula", "cpu"))]
WIDE = ["auto", "formula"]  # these know float64 and weights; the kernels know neither

register()
for engine in ("formula", "cpu"):  # "auto" leaves calls as small as these to torch's attention
    register(ENGINES[engine], engine=engine)


@pytest.fixture(scope="module")
def family() -> dict[str, Named]:
    return {name: made(name) for name in NAMES}


def no_further(found: Tensor, plain: Tensor, exact: Tensor, what: str = "", scale: float | None = None) -> None:
    """Found is at most twice as far from the exact answer as the plain formula is, but for two units in the last place of
    ``scale``, by default the greatest of the exact."""
    last = 2 * torch.finfo(found.dtype).eps * (exact.abs().max().item() if scale is None else scale)
    errors = [(x.double() - exact.double()).abs().max().item() for x in (found, plain)]
    assert errors[0] <= 2 * errors[1] + last, (what, *errors)


# The same answers.


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_same_logits_as_eager(name: str, engine: str, family: dict[str, Named]) -> None:
    plain, exact = family[name].on("eager").logits(), family[name].on("eager", torch.float64).logits()
    assert exact.std() > 0.1 and exact.shape == (2, TARGET, VOCABULARY)
    no_further(family[name].on(ENGINES[engine]).logits(), plain, exact)
    if engine in WIDE:
        wide = family[name].on(ENGINES[engine], torch.float64).logits()
        torch.testing.assert_close(wide, exact, atol=1e-11, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients_as_eager(name: str, engine: str, family: dict[str, Named]) -> None:
    plain = family[name].on("eager").gradients()
    exact = family[name].on("eager", torch.float64).gradients()
    found = family[name].on(ENGINES[engine]).gradients()
    assert found.keys() == exact.keys() == dict(family[name].model.named_parameters()).keys() - untrained(name)
    greatest = max(x.abs().max().item() for x in exact.values())
    for weight in exact:  # a bias of the keys has the gradient 0, and only rounding is left of it
        no_further(found[weight], plain[weight], exact[weight], weight, greatest)


def untrained(name: str) -> set[str]:
    """What has no gradient under any attention."""
    return {"model.encoder.embed_positions.weight"} if name == "Whisper" else set()


def test_the_gradient_of_t5s_position_bias(family: dict[str, Named]) -> None:
    """One table of (32 distances, 4 heads) for each stack, shared by its layers, added to the scores of every pair."""
    wanted = family["T5"].on("eager", torch.float64).gradients()
    tables = [name for name in wanted if name.endswith("relative_attention_bias.weight")]
    assert len(tables) == 2
    for engine in WIDE:
        found = family["T5"].on(ENGINES[engine], torch.float64).gradients()
        for name in tables:
            # 12 tokens in both directions reach several distances; behind them a decoder has only one.
            assert (wanted[name].abs().sum(1) > 1e-6).sum() >= 10
            limit = (
                64 * torch.finfo(torch.float64).eps * SOURCE**2
            )  # a distance sums over its pairs, a score over features
            torch.testing.assert_close(found[name], wanted[name], atol=limit, rtol=1e-9)


# Who sees whom.


@pytest.mark.parametrize("engine", WIDE)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_attention_weights_of_the_three_attentions(name: str, engine: str, family: dict[str, Named]) -> None:
    shown = family[name].on(ENGINES[engine])
    out = shown.model(**shown.given, output_attentions=True)
    eager = family[name].on("eager", torch.float64)
    exact = eager.model(**eager.given, output_attentions=True)
    alone = not shown.model.config.is_encoder_decoder
    past = torch.ones(TARGET, TARGET).tril().bool().expand(2, 4, TARGET, TARGET)
    for kind in ["attentions"] if alone else ["decoder_attentions", "cross_attentions", "encoder_attentions"]:
        assert len(getattr(out, kind)) == 2
        for found, wanted in zip(getattr(out, kind), getattr(exact, kind), strict=True):
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
            visible = past if kind in ("attentions", "decoder_attentions") else torch.ones_like(found).bool()
            assert torch.equal(found > 0, visible)
            assert (found[~visible] == 0).all()  # exactly


@pytest.mark.parametrize("engine", WIDE)
@pytest.mark.parametrize("name", BOTH_SIDES)
@torch.no_grad()
def test_the_end_of_the_source_is_seen_from_everywhere(name: str, engine: str, family: dict[str, Named]) -> None:
    whole = family[name].on(ENGINES[engine], torch.float64)
    (key, source), encoder = next(iter(whole.source.items())), whole.model.get_encoder()
    other = source.clone()
    other[..., -1] = source[..., -1] + 1 if source.is_floating_point() else 3 + (source[..., -1] + 1) % 30
    for before, after in (
        (encoder(source).last_hidden_state, encoder(other).last_hidden_state),
        (whole.logits(), whole.logits(**{key: other})),
    ):
        assert ((before - after).abs().amax(-1) > 1e-7).all()  # the first position as well as the last
    ids = whole.given["decoder_input_ids"].clone()
    ids[:, -1] = 3 + (ids[:, -1] + 1) % 30
    before, after = whole.logits(), whole.logits(decoder_input_ids=ids)
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["T5", "BART"])
@torch.no_grad()
def test_padding_of_the_source_does_not_change_the_logits(name: str, engine: str, family: dict[str, Named]) -> None:
    model, given = family[name].on(ENGINES[engine]).model, family[name].given
    real = torch.ones(2, SOURCE, dtype=torch.long)
    real[1, 7:] = 0
    alone = {"input_ids": given["input_ids"][1:, :7], "decoder_input_ids": given["decoder_input_ids"][1:]}
    expected, limit = with_rounding(lambda: model(**alone).logits, model.parameters(), terms=64)
    for pad in (0, 17):
        source = torch.where(real.bool(), given["input_ids"], pad)
        found = model(input_ids=source, attention_mask=real, decoder_input_ids=given["decoder_input_ids"]).logits[1:]
        assert (found - expected).abs().max() <= limit


# Generating.


@pytest.mark.parametrize("engine", AUTO_FIRST)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["greedy", "beams", "no cache", "static cache"])
@torch.no_grad()
def test_the_same_tokens_as_eager(name: str, how: str, engine: str, family: dict[str, Named]) -> None:
    tokens = {attention: generated(family[name].on(attention), how) for attention in ("eager", ENGINES[engine])}
    assert tokens["eager"] == tokens[ENGINES[engine]]
    assert len({tuple(row) for row in tokens["eager"]}) == 2 and len(tokens["eager"][0]) >= 8
    if how in ("no cache", "static cache"):
        assert tokens["eager"] == generated(family[name].on("eager"), "greedy")


def generated(named: Named, how: str) -> list[list[int]]:
    options: dict[str, Any] = {
        "greedy": {},
        "beams": {"num_beams": 3},
        "no cache": {"use_cache": False},
        "static cache": {"cache_implementation": "static"},
    }[how]
    prompt = named.source or {"input_ids": named.given["input_ids"][:, :4]}
    if "input_ids" in prompt:  # on the left, where a decoder has its pads
        prompt = prompt | {"attention_mask": torch.ones_like(prompt["input_ids"])}
        if not named.source:
            prompt["attention_mask"][1, :2] = 0
    prompt |= {"min_new_tokens": 8, "max_new_tokens": 8, "no_repeat_ngram_size": 1}  # else small models stutter
    return named.model.generate(**prompt, **options, do_sample=False).tolist()


# The audit, on the engines that do not touch what is hidden; on "auto" it is in test_what_was_asked.py.


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ["formula", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_the_audit_finds_no_leak(name: str, engine: str, family: dict[str, Named]) -> None:
    report = family[name].on(ENGINES[engine]).audit()
    assert report.ok, report.message
    found = {finding.probe: finding.status for finding in report.findings}
    clean = ["change", "gradient", "prefix", "batch", "cache", "code_paths", "sensitivity", "poison"]
    assert {probe: found[probe] for probe in clean} == dict.fromkeys(clean, "clean"), report.findings
