"""Tables of kernels: which one a layer gets, by covariance structure and by the kind of its layer noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[[Any], Any])


class Kernels(Generic[T]):
    """From a structure and a kind of layer noise to a function that makes something of a layer.

    A kind without an entry of its own, or whose entry returns None for a layer, is served as its base class: the entry
    of the most general kind is for all that have no faster one.
    """

    def __init__(self) -> None:
        self._table: dict[tuple[str, type], Callable[[Any], T | None]] = {}

    def add(self, structure: str, *kinds: type) -> Callable[[F], F]:
        """Register a function for layers whose layer noise is of one of the kinds."""

        def register(function: F) -> F:
            self._table.update({(structure, kind): function for kind in kinds})
            return function

        return register

    def of(self, structure: str, kind: type, layer: Any) -> T:
        """What the table makes of a layer."""
        for each in kind.__mro__:
            function = self._table.get((structure, each))
            made = None if function is None else function(layer)
            if made is not None:
                return made
        raise KeyError(f"no kernel for {kind.__name__} with covariance='{structure}'")
