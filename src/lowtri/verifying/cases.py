"""The calls of a verification, as data: each case has a name, the reason why it is there, and its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lowtri.masks import Mask, keys, table
from lowtri.masks import mask as mask_of
from lowtri.verifying.definition import Problem


@dataclass(frozen=True)
class Case:
    """One call of a verification.

    Attributes:
        name, why: what it is, and the reason why it is there.
        text: the mask; "random table", "empty rows", "top left", "bottom right" and "padding ..." are made for the sizes.
        b, hq, hkv, nq, nk, d, dv: the sizes; hq is a multiple of hkv.
        scale, softcap: None for the default and for none.
        bias: "" for none, or "full", "broadcast" (over rows and queries), "keys" (over heads and queries), "with -inf", "low" (many
            numbers are -100, in some rows all), "alibi".
        sinks: whether each head has a sink.
        lse: whether the log-sum-exp is compared.
        numbers: "normal", "large", "equal", "denormal", "low" (scores below -1e9), or where NaN or inf lies: "NaN queries" ...
        layout: "contiguous", "transposed" (tokens before heads) or "strided".
        gradients: whether gradients are compared.
        seed: of the random numbers.
    """

    name: str
    why: str
    text: str = "causal"
    b: int = 2
    hq: int = 2
    hkv: int = 2
    nq: int = 37
    nk: int = 37
    d: int = 16
    dv: int = 16
    scale: float | None = None
    softcap: float | None = None
    bias: str = ""
    sinks: bool = False
    lse: bool = False
    numbers: str = "normal"
    layout: str = "contiguous"
    gradients: bool = True
    seed: int = 0

    @cached_property
    def mask(self) -> Mask:
        return self._mask(self.text)

    @cached_property
    def visible(self) -> Tensor:
        """(B, Hq, Nq, Nk), True = may see; queries stand at the last Nq positions of the keys."""
        return self.visible_under(self.text)

    def visible_under(self, text: str) -> Tensor:
        """The pairs that another mask shows, (B, Hq, Nq, Nk)."""
        dense = np.asarray(self._mask(text).dense(self.nq, self.nk))  # (Nq, Nk), or with a row in front
        dense = dense[:, None] if dense.ndim == 3 else dense
        return torch.from_numpy(np.broadcast_to(dense, (self.b, self.hq, self.nq, self.nk)).copy())

    def _mask(self, text: str) -> Mask:
        if text in ("random table", "empty rows"):
            drawn = np.random.default_rng(self.seed).random((self.nq, self.nk)) < 0.5
            return table(drawn if text == "random table" else drawn & (np.arange(self.nq) % 3 > 0)[:, None])
        if text == "top left":
            return table(np.tri(self.nq, self.nk, dtype=bool))
        if text == "bottom right":  # "causal" is that for as many queries as keys, or fewer
            return table(np.tri(self.nq, self.nk, self.nk - self.nq, dtype=bool))
        if text.startswith("padding"):
            real = np.ones((self.b, self.nk), bool)
            places = {"left": slice(0, 5), "right": slice(self.nk - 5, None), "inside": slice(9, 13)}
            real[0, places[text.split()[1]]] = False
            return mask_of("causal") & keys(real if self.b > 1 else real[0])
        return mask_of(text)

    def draw(self, dtype: torch.dtype) -> Problem:
        """The call, with numbers that are rounded to a dtype and given as float64; NaN and infinity included."""
        source = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source, dtype=torch.float64)

        q = normal(self.b, self.hq, self.nq, self.d)
        k, v = normal(self.b, self.hkv, self.nk, self.d), normal(self.b, self.hkv, self.nk, self.dv)
        if self.numbers == "large":  # scores up to about 1e4
            q, k = q * 50, k * 50
        elif self.numbers == "equal":
            q, k = torch.ones_like(q), torch.ones_like(k)
        elif self.numbers == "denormal":
            v = v * float(torch.finfo(dtype).tiny) / 4
        elif self.numbers == "low":
            q, k = torch.full_like(q, 2.0**15), torch.full_like(k, -(2.0**15))
        elif self.numbers == "NaN seen late":  # a token that later queries see, and earlier ones do not
            k[:, :, self.nk // 2], v[:, :, self.nk // 2] = math.nan, math.nan
        bias = {
            "full": normal(self.b, self.hq, self.nq, self.nk),
            "broadcast": normal(1, self.hq, 1, self.nk),
            "keys": normal(self.b, 1, 1, self.nk),
            "low": torch.where(normal(1, 1, self.nq, self.nk) < 1, -100.0, normal(1, 1, self.nq, self.nk)),
            "with -inf": torch.where(normal(1, 1, self.nq, self.nk) < 1, normal(1, 1, self.nq, self.nk), -math.inf),
        }.get(self.bias)
        slopes = 2.0 ** -torch.arange(1.0, self.hq + 1, dtype=torch.float64) if self.bias == "alibi" else None
        if slopes is not None:
            distance = torch.arange(self.nk - self.nq, self.nk)[:, None] - torch.arange(self.nk)
            bias = -slopes[None, :, None, None] * distance.abs()
        sinks = normal(self.hq) if self.sinks else None
        unseen_keys = ~self.visible.any(2).any(1)[:, None, :, None]  # (B, 1, Nk, 1)
        garbage = math.nan if self.numbers.startswith("NaN") else math.inf
        if self.numbers.endswith("keys and values"):
            k = torch.where(unseen_keys, garbage, k)
        if self.numbers.endswith("values"):
            v = torch.where(unseen_keys, garbage, v)
        if self.numbers.endswith("queries"):
            q = torch.where(self.visible.any(-1)[..., None], q, garbage)
        d_output = normal(self.b, self.hq, self.nq, self.dv)

        def rounded(x: Tensor) -> Tensor:
            return x.to(dtype).double()

        return Problem(
            case=self,
            q=rounded(q),
            k=rounded(k),
            v=rounded(v),
            visible=self.visible,
            scale=1 / math.sqrt(self.d) if self.scale is None else self.scale,
            softcap=self.softcap,
            bias=None if bias is None else rounded(bias),
            sinks=None if sinks is None else rounded(sinks),
            slopes=slopes,
            d_output=rounded(d_output),
            kv_heads=torch.arange(self.hq) // (self.hq // self.hkv),
        )

    @property
    def is_finite(self) -> bool:
        """Whether no position that is hidden from a query holds NaN or infinity."""
        return not self.numbers.startswith(("NaN", "inf"))

    @property
    def features(self) -> frozenset[str]:
        """What a callable must offer to take this case, beyond equal heads and lengths and a common head size."""
        features = {
            "grouped heads": 1 < self.hkv < self.hq,
            "one key/value head": self.hkv == 1 < self.hq,
            f"head size {self.d}": self.d not in (16, 64),
            "values of another size": self.dv != self.d,
            "fewer queries than keys": self.nq < self.nk,
            "more queries than keys": self.nq > self.nk,
            "zero sizes": 0 in (self.b, self.nq, self.nk),
            "softcap": self.softcap is not None,
            "scale": self.scale is not None,
            "ALiBi": self.bias == "alibi",
            "bias": self.bias not in ("", "alibi"),
            "sinks": self.sinks,
            "log-sum-exp": self.lse,
            f"{self.layout} inputs": self.layout != "contiguous",
            "masks by row": self.text.startswith("padding"),
            "no mask": self.text == "full",
            f"mask {self.text}": self.text not in ("causal", "full"),
        }
        return frozenset(name for name, needed in features.items() if needed)

    def smaller(self) -> list[Case]:
        """Cases with one size halved, to find the smallest one that shows a difference."""
        nq, d = self.nq // 2, self.d // 2
        changes: list[dict[str, int]] = [{"b": self.b // 2}, {"nq": nq, "nk": nq} if self.nq == self.nk else {"nq": nq}]
        if not self.text.startswith("heads"):
            changes.append({"hq": self.hq // self.hkv, "hkv": 1})
        if self.nq != self.nk:
            changes.append({"nk": max(self.nk // 2, min(self.nq, self.nk))})
        changes += [{"d": d, "dv": d}] if self.d == self.dv else [{"d": d}, {"dv": self.dv // 2}]
        cases = [replace(self, **change) for change in changes]  # type: ignore[arg-type]
        return [case for case in cases if case != self and 0 not in (case.b, case.nq, case.nk, case.d, case.dv)]


CASES = (
    Case("full", "no mask: scale, softmax and heads alone", "full"),
    Case("causal", "the mask of language models"),
    Case("one token", "the smallest call", "full", b=1, hq=1, hkv=1, nq=1, nk=1, d=4, dv=4),
    Case("130 tokens", "more than two tiles of 64, and not a whole number of them", nq=130, nk=130),
    Case("129 tokens", "a tile of one token, after tiles of 64 and of 128", nq=129, nk=129),
    Case("64 tokens", "exactly one tile of most kernels", nq=64, nk=64),
    Case("300 tokens", "more keys than any tile has, and the most common head size", nq=300, nk=300, d=64, dv=64, b=1),
    Case("12 heads", "more heads than vectors have lanes", hq=12, hkv=12, b=1),
    Case("one query, 130 keys", "a step of decoding: the query stands at the last key", nq=1, nk=130),
    Case("five queries, 130 keys", "appending several tokens: bottom-right alignment", nq=5, nk=130),
    Case("aligned to the first key", "query i sees keys 0 .. i, as torch's is_causal has it", "top left", nq=20, nk=33),
    Case("more queries than keys", "cross-attention to a short text", "full", nq=40, nk=23),
    Case("more queries than keys, aligned to the last key", "the first queries see nothing", "bottom right", nq=40, nk=23),
    *(
        Case(f"head size {d}", "a size that no vector divides, or a large one", nq=20, nk=20, d=d, dv=d)
        for d in (1, 3, 40, 80, 128, 256)
    ),
    Case("values of another size", "Dv is not D", d=24, dv=40),
    Case("grouped heads", "query head h reads key/value head h // group", hq=6, hkv=2),
    Case("one key/value head", "multi-query attention", hq=4, hkv=1),
    Case("grouped heads, one query", "decoding with grouped heads", hq=8, hkv=2, nq=1, nk=90),
    Case("transposed inputs", "(B, N, H, D) in memory", layout="transposed"),
    Case("strided inputs", "every second number of a larger tensor", layout="strided"),
    Case("window of 5", "a window counts the query's own key", "causal & window(5)"),
    Case("window of 64 in 150", "a window across the edges of tiles", "causal & window(64)", nq=150, nk=150),
    Case("window of 8, 5 queries", "a window while decoding", "causal & window(8)", nq=5, nk=90),
    Case("window on both sides", "before and after", "band(3, 2)"),
    Case("documents", "packed rows", "causal & documents(lengths=[7, 1, 22, 7])"),
    Case("documents, both ways", "packed encoders", "documents(lengths=[20, 17])"),
    Case("documents of 200 tokens", "packed rows across tiles", "causal & documents(lengths=[90, 70, 40])", b=1, nq=200, nk=200),
    Case("prefix", "a prefix read in both directions", "causal | first(5)"),
    Case("sinks and window", "the first keys stay visible", "causal & (window(4) | first(2))"),
    Case("dilated", "every third key", "causal & strided(3)"),
    Case("chunks", "blocks of eight", "causal & chunks(8)"),
    Case("masks of heads", "each head has its own", "heads([causal, causal & window(3)])"),
    Case("random table", "no structure at all", "random table"),
    Case("padding left", "a padded batch", "padding left"),
    Case("padding right", "a padded batch", "padding right"),
    Case("padding left, 5 queries", "rows of different lengths while decoding", "padding left", nq=5, nk=40),
    Case("padding of 200 tokens", "pads across tiles", "padding right", nq=200, nk=200),
    Case("padding inside", "pads between tokens", "padding inside"),
    Case("empty rows", "a query that sees nothing: output 0, no gradient", "empty rows"),
    Case("empty first row", "a strict mask: position 0 sees nothing", "causal - window(1)"),
    Case("bias", "added to the scaled scores", bias="full"),
    Case("bias of heads and keys", "broadcast over rows and queries", bias="broadcast"),
    Case("bias of keys", "a number for each key of a row", "full", bias="keys"),
    Case("bias of -100", "a low number does not hide, also where a row has no other", bias="low"),
    Case("bias, 5 queries", "a mask and a bias while decoding", "causal & window(8)", nq=5, nk=60, bias="full"),
    Case("bias, more queries than keys", "a table and a bias over a short text", "random table", nq=40, nk=23, bias="full"),
    Case("bias with -inf", "a bias that hides, too", bias="with -inf"),
    Case("ALiBi", "slopes times distance", bias="alibi"),
    Case("ALiBi, 5 queries", "distances while decoding", bias="alibi", nq=5, nk=40),
    Case("softcap", "c tanh(score / c)", softcap=1.5),
    Case("softcap and bias", "the cap comes before the bias", softcap=1.5, bias="full"),
    Case("scale", "a scale that is not 1 / sqrt(D)", scale=0.7),
    Case("sink logits", "a logit for each head in the softmax", sinks=True),
    Case("scores of 1e4", "exp of them overflows without the maximum", numbers="large", gradients=False),
    Case("scores below -1e9", "-1e9 is no infinity", numbers="low", scale=1.0, gradients=False),
    Case("equal scores", "the weights are 1 / n", numbers="equal"),
    Case("denormal values", "values below the smallest normal number", numbers="denormal", gradients=False),
    Case("NaN in hidden keys and values", "pads hold anything", "padding right", numbers="NaN keys and values"),
    Case("inf in hidden values", "0 times inf is NaN", "padding inside", numbers="inf values"),
    Case("NaN in queries that see nothing", "they leave no trace", "empty rows", numbers="NaN queries"),
    Case("NaN that later queries see", "earlier ones must not", numbers="NaN seen late", gradients=False),
    Case("no rows", "an empty batch", b=0),
    Case("no queries", "nothing to compute", "full", nq=0),
    Case("no keys", "every query sees nothing", "full", nk=0, gradients=False),
    Case("log-sum-exp", "natural logarithm of the sum over scaled scores", lse=True),
    Case("log-sum-exp of a window", "sums over visible keys alone", "causal & window(5)", lse=True, nq=5, nk=60),
    Case("log-sum-exp of empty rows", "-inf", "empty rows", lse=True),
)  # fmt: skip
