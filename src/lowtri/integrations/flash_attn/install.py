"""Makes ``import flash_attn`` find lowtri's functions where the real package is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lowtri.errors import CallError
from lowtri.integrations.flash_attn.functions import MARK, is_real_installed

__all__ = ["install"]

VERSION = "2.8.3+lowtri"  # of the package whose functions these are

_MODULES = {
    "flash_attn": "functions",
    "flash_attn.flash_attn_interface": "functions",
    "flash_attn.bert_padding": "bert_padding",
    "flash_attn.layers": "",
    "flash_attn.layers.rotary": "layers_rotary",
}


def install() -> str:
    """Make ``import flash_attn`` find lowtri's functions, in this process; returns a sentence that says what was done.

    >>> from lowtri.integrations import flash_attn as ours
    >>> print(ours.install())  # doctest: +ELLIPSIS
    flash_attn is now lowtri's: flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding, ...
    >>> from flash_attn import flash_attn_func
    >>> flash_attn_func is ours.flash_attn_func
    True
    >>> import flash_attn.ops.triton  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ModuleNotFoundError: flash_attn.ops is not offered by lowtri, which has flash_attn_func, ...

    Models that read the package's metadata instead of importing it, as transformers does, do not find it.

    Raises:
        CallError: if the real package is installed; it is never shadowed.
    """
    names = _names()
    if "flash_attn" in sys.modules and not is_real_installed():
        return f"flash_attn is already lowtri's: {names}"
    if is_real_installed():
        raise CallError(
            "install: the real package flash_attn is installed, and is not shadowed.\n"
            "Fix: from lowtri.integrations.flash_attn import flash_attn_func, which lowtri runs on CPU tensors."
        )
    modules = {name: _module(name) for name in _MODULES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    vars(modules["flash_attn"])["__version__"] = VERSION
    sys.modules.update(modules)
    if _NotOffered not in sys.meta_path:
        sys.meta_path.append(_NotOffered)
    return f"flash_attn is now lowtri's: {names}"


def _module(name: str) -> ModuleType:
    """A module with lowtri's functions; a package, so that Python asks :class:`_NotOffered` for any other name."""
    module = ModuleType(name, "Functions of lowtri.integrations.flash_attn.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    setattr(module, MARK, True)
    source: Any = import_module(f"lowtri.integrations.flash_attn.{_MODULES[name]}") if _MODULES[name] else None
    offered = getattr(source, "__all__", [])
    vars(module).update({"__all__": offered, **{public: getattr(source, public) for public in offered}})

    def missing(attribute: str) -> Any:
        raise AttributeError(_not_offered(f"{name}.{attribute}"))

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


class _NotOffered:
    """The last finder of imports: names the modules, and the names in them, that lowtri does not offer."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("flash_attn.") and hasattr(sys.modules.get("flash_attn"), MARK):
            # Without name=, which would have `from flash_attn import x` go on to an error of its own.
            raise ModuleNotFoundError(_not_offered(name))


def _names() -> str:
    return ", ".join(name for name, file in _MODULES.items() if file)


def _not_offered(name: str) -> str:
    module: Any = sys.modules[name.rpartition(".")[0]]
    offered = ", ".join([*module.__all__, _names()])
    return f"{name} is not offered by lowtri, which has {offered}. Fix: one of these, or the real package on a GPU."
