"""One variance per entry, `C = diag(v)`: entries count as independent. Stores `v` in the shape of the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from propagauss.errors import InputError
from propagauss.structures.protocol import Map, Value


class Diagonal:
    """Memory like that of the mean. Forgets that copies of an entry are one random number."""

    name = "diagonal"
    stores = "variance"
    joint = False

    def __reduce__(self) -> str:  # copies and pickles are the same object
        return "DIAGONAL"

    def read(self, x: Value) -> Tensor:
        return x.variance

    def variance(self, x: Value) -> Tensor:
        return x.stored

    def dense(self, x: Value) -> Tensor:
        v = x.stored.unsqueeze(-1) if x.stored.dim() < 2 else x.stored
        return torch.diag_embed(v.flatten(1))

    def samples(self, x: Value) -> Any:
        return 1

    def deviation(self, x: Value, standard: Tensor) -> Tensor:
        return standard * x.stored.sqrt()

    def scaled(self, x: Value, factor: Tensor) -> Tensor:
        return x.stored * factor.square()

    def gated(self, x: Value, gate: Tensor) -> Tensor:
        return x.stored * gate

    def mapped(self, x: Value, linear: Map, squared: Map | None = None) -> Tensor:
        return (squared or linear)(x.stored)

    def split(self, x: Value, linear: Callable[[Tensor], Sequence[Tensor]], count: int) -> Sequence[Tensor]:
        return linear(x.stored)

    def expanded(self, x: Value, shape: torch.Size) -> Tensor:
        return x.stored.expand(shape)

    def reshaped(self, x: Value, shape: Sequence[Any]) -> Tensor:
        return x.stored.reshape(shape)

    def matched(self, x: Value, variance: Tensor, slope: Tensor | None) -> Tensor:
        return variance

    def certain(self, x: Value, mean: Tensor) -> Tensor:
        return torch.zeros_like(mean)

    def plus(self, mean: Tensor, parts: Sequence[Value]) -> Tensor:
        first, *rest = parts
        total = first.variance
        for part in rest:
            total = total + part.variance
        return total.expand_as(mean)

    def times(self, mean: Tensor, x: Value, y: Value) -> Tensor:
        """`v_x (m_y² + v_y) + m_x² v_y`"""
        a, b = (y, x) if x.mean.dim() < y.mean.dim() else (x, y)  # b may be a parameter: its moments come first
        second = b.mean.square() + b.variance
        return torch.addcmul(a.variance * second, a.mean.square(), b.variance)

    def joined(self, mean: Tensor, join: Callable[[list[Tensor]], Tensor], parts: Sequence[Value | Tensor]) -> Tensor:
        return join([torch.zeros_like(p) if isinstance(p, Tensor) else p.variance for p in parts])

    def check_shape(self, mean: Tensor, stored: Tensor) -> None:
        if stored.shape != mean.shape:
            raise InputError(f"variance has shape {tuple(stored.shape)}, the mean {tuple(mean.shape)}: they must agree")

    def check_values(self, stored: Tensor) -> None:
        return


DIAGONAL = Diagonal()
