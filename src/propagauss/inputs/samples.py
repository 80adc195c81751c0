"""Batches in which some samples are others, to see whether those that are not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FEW = 6  # samples tell as much as many, where a model takes any number of them; a shift by as many is rare


def has_samples(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch


def patterns(batch: int) -> list[Tensor]:
    """Sets of samples as masks `[B]`: of any two samples, in either order, some set has the first alone.

    That takes two sets for each binary digit of their numbers.
    """
    numbers = torch.arange(batch)
    odd = [(numbers >> digit) % 2 == 1 for digit in range((batch - 1).bit_length())]
    return [one for mask in odd for one in (mask, ~mask)]


def halves(batch: int) -> list[Tensor]:
    """Some half of the samples and the rest, for what many pairs of samples do: one look at each is enough for that."""
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(0))
    return [order < batch // 2, order >= batch // 2]


def few(value: Tensor) -> Tensor:
    """Some of the first samples and of the last, if there are more than `FEW`."""
    return value if len(value) <= FEW else torch.cat([value[: FEW // 2], value[-(FEW - FEW // 2) :]])


def with_others(value: Tensor, changed: Tensor) -> Tensor:
    """Samples replaced by what is between them and those before them, or by half of themselves: models take these."""
    mask = changed.to(value.device).view(-1, *(1,) * (value.dim() - 1))
    before = value.roll(1, 0)
    if not (value.is_floating_point() or value.is_complex()):
        return torch.where(mask, before, value)
    same = (value == before).reshape(len(value), -1).all(1).view_as(mask)
    return torch.where(mask, torch.where(same, value / 2, (value + before) / 2), value)


@dataclass(frozen=True)
class Batch:
    """The values of a call, and which of them have samples."""

    values: list[Any]
    have: list[bool]
    size: int

    @staticmethod
    def of(values: list[Any], size: int) -> Batch:
        return Batch(values, [has_samples(v, size) for v in values], size)

    def few(self) -> Batch:
        return Batch(self._mapped(few), self.have, min(self.size, FEW))

    def changed(self, mask: Tensor) -> list[Any]:
        return self._mapped(lambda v: with_others(v, mask))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> list[Any]:
        return [function(v) if has else v for v, has in zip(self.values, self.have, strict=True)]
