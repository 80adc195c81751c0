"""What rules ask of a covariance structure, whatever it stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


class Value(Protocol):
    """What a structure reads of a `Gaussian`."""

    mean: Tensor
    stored: Tensor

    @property
    def variance(self) -> Tensor: ...

    @property
    def covariance(self) -> Tensor: ...

    def expanded(self, shape: torch.Size) -> Value: ...

    def mapped(self, mean: Tensor, linear: Map, squared: Map | None = None) -> Value: ...


class Structure(Protocol):
    """A way to store the covariance `C` of a Gaussian with mean `m`.

    The methods return what is stored for the result. Those of one value take it in this structure; those of several
    values take each in any structure.
    """

    @property
    def name(self) -> str:
        """As `Gaussian.structure` says it."""
        ...

    @property
    def stores(self) -> str:
        """The name of what is stored, for messages."""
        ...

    @property
    def joint(self) -> bool:
        """Whether the entries of a sample are kept together and samples apart; memory then grows quadratically."""
        ...

    # -- reading

    def read(self, x: Value) -> Tensor:
        """What this structure stores of a value in any structure."""
        ...

    def variance(self, x: Value) -> Tensor:
        """`diag(C)` in the shape of the mean."""
        ...

    def dense(self, x: Value) -> Tensor:
        """`C` of each sample: `[batch, n, n]`."""
        ...

    def samples(self, x: Value) -> Any:
        """How many samples are kept apart; 1 for a value that is the same for all, or where none are."""
        ...

    def deviation(self, x: Value, standard: Tensor) -> Tensor:
        """Standard normal numbers `[*draws, *shape]` as deviations with covariance `C`."""
        ...

    # -- one value

    def scaled(self, x: Value, factor: Tensor) -> Tensor:
        """`D C D`, `D = diag(factor)`, with a factor that broadcasts to the mean."""
        ...

    def gated(self, x: Value, gate: Tensor) -> Tensor:
        """`scaled` by a gate in the shape of the mean that is 0 or 1 everywhere, and so its own square."""
        ...

    def mapped(self, x: Value, linear: Map, squared: Map | None = None) -> Tensor:
        """`J C Jᵀ` for a linear map that keeps samples apart; `squared` has the coefficients `J²`."""
        ...

    def split(self, x: Value, linear: Callable[[Tensor], Sequence[Tensor]], count: int) -> Sequence[Tensor]:
        """`mapped` for a map with `count` results that only moves entries."""
        ...

    def expanded(self, x: Value, shape: torch.Size) -> Tensor:
        """Broadcast; copies of an entry are the same random number."""
        ...

    def reshaped(self, x: Value, shape: Sequence[Any]) -> Tensor:
        """Another shape with the entries in the same order."""
        ...

    def matched(self, x: Value, variance: Tensor, slope: Tensor | None) -> Tensor:
        """These variances, and in joint structures `D C D` with `D = diag(slope)` between different entries."""
        ...

    def certain(self, x: Value, mean: Tensor) -> Tensor:
        """Zero, for another mean with the samples of `x`."""
        ...

    # -- several values, independent of one another

    def plus(self, mean: Tensor, parts: Sequence[Value]) -> Tensor:
        """`Σ C_i` for parts in the shape of their sum."""
        ...

    def times(self, mean: Tensor, x: Value, y: Value) -> Tensor:
        """`D_y C_x D_y + D_x C_y D_x + C_x ∘ C_y`, `D = diag(m)`: exact for a product entry by entry."""
        ...

    def joined(self, mean: Tensor, join: Callable[[list[Tensor]], Tensor], parts: Sequence[Value | Tensor]) -> Tensor:
        """Parts put side by side by `join`; plain tensors are certain."""
        ...

    # -- checking

    def check_shape(self, mean: Tensor, stored: Tensor) -> None:
        """Raise `InputError` unless the sizes fit."""
        ...

    def check_values(self, stored: Tensor) -> None:
        """Raise `InputError` for what a look at the variances does not find."""
        ...
