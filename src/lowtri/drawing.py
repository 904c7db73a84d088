"""The methods that draw: each is a function of :mod:`lowtri.pictures`, imported when the method is first used.

Masks, the choice of an engine and the key/value cache know no pictures; whoever shows one loads the code that draws it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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


class Drawing:
    """A method of :data:`METHODS`; at its first use the function takes its place in the class."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        module, function = METHODS[f"{self._owner.__name__}.{self._name}"]
        setattr(self._owner, self._name, getattr(import_module(module), function))
        return getattr(owner if instance is None else instance, self._name)
