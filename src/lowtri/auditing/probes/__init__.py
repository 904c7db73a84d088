"""The probes: one file each, with a record `PROBE` at its end."""

from __future__ import annotations

from importlib import import_module

from lowtri.auditing.probe import Probe

__all__ = ["PROBES", "probe_table"]

_FILES = (  # in the order in which the probes run
    "change",
    "gradient",
    "prefix",
    "batch",
    "padding",
    "packing",
    "cache",
    "code_paths",
    "training",
    "longer",
    "poison",
    "sensitivity",
)

PROBES: tuple[Probe, ...] = tuple(import_module(f"{__name__}.{file}").PROBE for file in _FILES)


def probe_table() -> str:
    """The probes as the Markdown table of docs/audit.md."""
    lines = ["| probe | what it does | what it finds | what it needs |", "|---|---|---|---|"]
    for probe in PROBES:
        needs = ", ".join(need.what for need in probe.needs if need.what)
        lines.append(f"| {probe.name} | {probe.does} | {probe.finds} | {needs} |")
    return "\n".join(lines)
