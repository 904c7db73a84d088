"""The methods that draw: each is a function of :mod:`lowtri.pictures`, imported when the method is first used.

Masks, the choice of an engine and the key/value cache know no pictures; whoever shows one loads the code that draws it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T", bound=type)

# class.method -> the module and the function that draws.
METHODS = {
    "Mask.draw": ("lowtri.pictures.masks", "draw"),
    "Mask.save": ("lowtri.pictures.masks", "save"),
    "Mask._repr_svg_": ("lowtri.pictures.masks", "notebook_svg"),
    "Mask._repr_html_": ("lowtri.pictures.masks", "notebook_html"),
    "Choice._repr_html_": ("lowtri.pictures.engines", "notebook_html"),
    "KVCache.draw": ("lowtri.pictures.caches", "draw"),
    "KVCache._repr_svg_": ("lowtri.pictures.caches", "notebook_svg"),
    "KVCache._repr_html_": ("lowtri.pictures.caches", "notebook_html"),
}


def with_drawings(owner: T) -> T:
    """Give a class its methods of :data:`METHODS`."""
    for place, (module, function) in METHODS.items():
        class_name, method = place.split(".")
        if class_name == owner.__name__:
            setattr(owner, method, _Drawing(owner, method, module, function))
    return owner


class _Drawing:
    """A method that is not imported yet; at its first use the function takes its place in the class."""

    def __init__(self, owner: type, method: str, module: str, function: str) -> None:
        self._owner = owner
        self._method = method
        self._module = module
        self._function = function

    def __get__(self, instance: object, owner: type) -> Any:
        setattr(self._owner, self._method, getattr(import_module(self._module), self._function))
        return getattr(owner if instance is None else instance, self._method)
