"""Module attributes that can be set only once, at construction."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from lowtri.errors import CallError

__all__ = ["Fixed"]

T = TypeVar("T")


class Fixed(Generic[T]):
    """A write-once attribute: the layers are built from it, so changing it later would not reach them.

    >>> class Model:
    ...     config: Fixed[int] = Fixed("Model(config)")
    >>> model = Model()
    >>> model.config = 3
    >>> model.config = 4
    Traceback (most recent call last):
    lowtri.errors.CallError: Model: config is what the model was built from; set now, it would not reach the layers.
    Fix: Model(config)

    Args:
        fix: what to do instead, for the error message.
    """

    def __init__(self, fix: str) -> None:
        self.fix, self.name = fix, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> T:
        if module is None or self.name not in vars(module):
            raise AttributeError(self.name)
        value: T = vars(module)[self.name]
        return value

    def __set__(self, module: Any, value: T) -> None:
        if self.name in vars(module):
            raise CallError(
                f"{type(module).__name__}: {self.name} is what the model was built from; set now, it would not reach "
                f"the layers.\nFix: {self.fix}"
            )
        vars(module)[self.name] = value
