"""Makes ``import flash_attn`` find lowtri's functions where the real package is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.real import MARK, is_real_installed

__all__ = ["install"]

VERSION = "2.8.3+lowtri"  # of the package whose functions these are

_MODULES = {
    "flash_attn": ("dense", "varlen", "kvcache"),
    "flash_attn.flash_attn_interface": ("dense", "varlen", "kvcache"),
    "flash_attn.bert_padding": ("bert_padding",),
}


def install() -> str:
    """Make ``import flash_attn`` find lowtri's functions, in this process; returns a sentence that says what was done.

    >>> from lowtri.integrations import flash_attn as ours
    >>> print(ours.install())
    flash_attn is now lowtri's: flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding
    >>> from flash_attn import flash_attn_func
    >>> flash_attn_func is ours.flash_attn_func
    True

    Models that read the package's metadata instead of importing it, as transformers does, do not find it.

    Raises:
        CallError: if the real package is installed; it is never shadowed.
    """
    names = ", ".join(_MODULES)
    if "flash_attn" in sys.modules and not is_real_installed():
        return f"flash_attn is already lowtri's: {names}"
    if is_real_installed():
        raise CallError(
            "install: the real package flash_attn is installed, and is not shadowed.\n"
            "Fix: from lowtri.integrations.flash_attn import flash_attn_func, which lowtri runs on CPU tensors."
        )
    modules = {name: ModuleType(name, "Functions of lowtri.integrations.flash_attn.") for name in _MODULES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None, is_package=name == "flash_attn")
        setattr(module, MARK, True)
        for file in _MODULES[name]:
            source = import_module(f"lowtri.integrations.flash_attn.{file}")
            vars(module).update({public: getattr(source, public) for public in source.__all__})
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["flash_attn"].__path__ = []
    vars(modules["flash_attn"])["__version__"] = VERSION
    sys.modules.update(modules)
    return f"flash_attn is now lowtri's: {names}"
