"""What a call costs through the functions of installed libraries, lowtri's beside the library's own: a part of ``lowtri bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lowtri.benching import medians, torch_threads
from lowtri.errors import UndecidedError
from lowtri.extras import is_installed
from lowtri.pictures.labels import ruled

_TURNS = 31
_TURN = 2e-3  # seconds that the repetitions of a turn take together


class LibraryRow(NamedTuple):
    """A call through a library's function, in seconds: on lowtri, and on the library's own attention."""

    library: str
    call: str
    lowtri: float
    own: float

    @property
    def times(self) -> float:
        """How many times faster lowtri is."""
        return self.own / self.lowtri


class Compared(NamedTuple):
    """Two calls that compute the same, through a library's function on lowtri and through the library's own."""

    library: str
    call: str
    lowtri: Callable[[], Any]
    own: Callable[[], Any]


def measure_libraries(threads: int = 1, progress: Callable[[str], None] = lambda _: None) -> Iterator[LibraryRow]:
    """A row for each installed library that lowtri can compute for.

    Raises:
        UndecidedError: if lowtri and a library give different outputs; the library is not timed then.
    """
    import torch

    with torch_threads(threads), torch.no_grad():
        for compared in _compared():
            progress(compared.library)
            output, expected = compared.lowtri(), compared.own()
            if not torch.allclose(output, expected, atol=1e-4, rtol=1e-4):
                raise UndecidedError(
                    f"bench: {compared.library}: outputs on lowtri and on its own attention differ by "
                    f"{float((output - expected).abs().max()):.2g}, so it was not timed."
                )
            seconds = medians({"lowtri": compared.lowtri, "own": compared.own}, _TURNS, turn=_TURN)
            yield LibraryRow(compared.library, compared.call, seconds["lowtri"], seconds["own"])


def _compared() -> Iterator[Compared]:
    yield _of_torch()
    yield _of_multihead()
    if is_installed("transformers"):
        yield _of_transformers()


def _of_torch() -> Compared:
    import torch
    import torch.nn.functional as F

    from lowtri.dispatch.sdpa_compatible import scaled_dot_product_attention as ours

    q, k, v = torch.randn(3, 1, 8, 256, 64, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(256)[None] >= 40  # True = attend
    return Compared(
        "torch.nn.functional.scaled_dot_product_attention",
        "8 heads of 64, 256 tokens, left-padded",
        lambda: ours(q, k, v, attn_mask=padding),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=padding),
    )


def _of_multihead() -> Compared:
    import torch

    from lowtri.integrations.torch import switch

    own = torch.nn.MultiheadAttention(256, 8, batch_first=True).eval()
    ours = torch.nn.MultiheadAttention(256, 8, batch_first=True).eval()
    ours.load_state_dict(own.state_dict())
    switch(ours)
    x = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0))
    future = torch.ones(128, 128, dtype=torch.bool).triu(1)  # True hides

    def run(module: Any) -> Any:
        return module(x, x, x, attn_mask=future, need_weights=False)[0]

    return Compared(
        "torch.nn.MultiheadAttention", "8 heads of 32, 4 x 128 tokens, causal", lambda: run(ours), lambda: run(own)
    )


def _of_transformers() -> Compared:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowtri.integrations.transformers import switch

    sizes: Any = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 500}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    own, ours = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    ours.load_state_dict(own.state_dict())
    own.set_attn_implementation("sdpa")
    switch(ours)
    ids = torch.randint(0, 500, (1, 256), generator=torch.Generator().manual_seed(0))

    def run(model: Any) -> Any:
        return model(ids, use_cache=False).logits

    return Compared("transformers", "a Llama of 2 layers of 256, a prompt of 256", lambda: run(ours), lambda: run(own))


def libraries_text(rows: list[LibraryRow]) -> str:
    """The table; milliseconds."""
    cells = [
        (row.library, row.call, f"{row.lowtri * 1e3:.2f}", f"{row.own * 1e3:.2f}", f"{row.times:.1f}") for row in rows
    ]
    return "\n".join(ruled([("library", "call", "lowtri, ms", "its own, ms", "x"), *cells]))


def libraries_json(rows: list[LibraryRow]) -> list[dict[str, Any]]:
    """Seconds."""
    return [row._asdict() for row in rows]
