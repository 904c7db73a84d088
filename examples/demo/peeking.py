"""The audit: who peeks, at which pair, and through which module."""

from __future__ import annotations

from dataclasses import replace

import torch

import lowtri
from demo.context import Context, Result
from lowtri.nn.decoder import Decoder

__all__ = ["SENTENCE", "TITLE", "run"]

TITLE = "Does a model peek?"
SENTENCE = (
    "The audit reads no code: it changes inputs and looks which outputs move; so it also says which mask a model has."
)


def run(context: Context) -> Result:
    """Audit the trained models: the clean one, the one without a mask, and one whose mask is the wrong way round."""
    models = context.experiment.models
    right = models["causal"]
    inverted = Decoder(replace(right.config, mask=repr(~lowtri.causal())))
    inverted.load_state_dict(right.state_dict())
    ids = torch.randint(2, right.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    result, blocks = Result(""), []
    for name, title, model, peeks in (
        ("masked", "trained with the mask", right, False),
        ("unmasked", "trained without it", models["full"], True),
        ("inverted", "the mask inverted, True and False confused", inverted.eval(), True),
        ("lstm", "a recurrent model (LSTM, untrained)", lowtri.nn.RecurrentLM(258, 64, cell="lstm").eval(), False),
    ):
        report = lowtri.audit(model, ids, mask="causal", progress=False)
        inferred = lowtri.infer_mask(model, ids)
        blocks.append(
            f"{title}\n{report.message}\nThe mask that it has: {inferred}"
            + (f"\n{report.draw(24)}" if report.leaks else "")
        )
        result.files.append(report.save(context.out / f"audit-{name}.html").name)
        first = report.first
        if name != "inverted":
            result.check(f"{title}: measured, its mask is {inferred}", inferred.text == ("full" if peeks else "causal"))
        if peeks:
            pairs = {(leak.query, leak.key) for leak in report.leaks if leak.direct}
            found = (
                f"{len(pairs)} pairs, the first ({first.query}, {first.key}) in {first.module}" if first else "nothing"
            )
            result.check(f"{title}: caught, {found}", first is not None and first.module is not None)
        else:
            result.check(f"{title}: {report.verdict}", report.ok)
    result.text = "\n\n".join(blocks)
    return result
