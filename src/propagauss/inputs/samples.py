"""Batches in which some samples are others, to see whether those that are not depend on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

FEW = 6  # samples tell as much as many, where a model takes any number of them; a shift by as many is rare
TOLERANCE = 1e-3  # of a typical change: what is not changed may be rounded otherwise


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


def depend(before: Tensor, after: Tensor, changed: Tensor) -> bool:
    """Whether rows that are not among the changed ones are others, too: `[B, ...]` before and after.

    Column by column, since some may be much larger, and beside what is typical of those that were changed, since one of
    them may be. A number that is not one any more is another.
    """
    changed = changed.to(before.device)
    rows, change = (precise(v).reshape(len(changed), -1) for v in (before, (after - before).abs()))
    lost = before.isfinite() & ~after.isfinite()
    typical = middle(change[changed].nan_to_num(posinf=0.0))
    least = 16 * torch.finfo(before.dtype).eps * rows[~changed].abs()
    return bool((change[~changed] > TOLERANCE * typical + least).any() or lost[~changed].any())


def takes(before: Tensor, after: Tensor) -> bool:
    """Whether a model makes numbers of samples that are made up, wherever it made some of those before."""
    return before.shape == after.shape and bool((after.isfinite() | ~before.isfinite()).all())


def precise(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def middle(rows: Tensor) -> Tensor:
    """The lower median along the first dimension."""
    return rows.sort(0).values[(len(rows) - 1) // 2]


def few(value: Tensor) -> Tensor:
    """Some of the first samples and of the last, if there are more than `FEW`."""
    return value if len(value) <= FEW else torch.cat([value[: FEW // 2], value[-(FEW - FEW // 2) :]])


def with_others(value: Tensor, changed: Tensor, gently: bool) -> Tensor:
    """Samples replaced by what is between them and those before them: models take these.

    Where both are the same there are parts of its numbers, or of one if all are zero. For integers there is nothing
    that every model takes: they stay what they are if it is done `gently`.
    """
    mask = changed.to(value.device).view(-1, *(1,) * (value.dim() - 1))
    before = value.roll(1, 0)
    same = (value == before).reshape(len(value), -1).all(1).view_as(mask)
    if not (value.is_floating_point() or value.is_complex()):
        other = value if gently else ~value if value.dtype == torch.bool else (value == 0).to(value.dtype)
        return torch.where(mask, torch.where(same, other, before), value)
    blank = same & (value == 0).reshape(len(value), -1).all(1).view_as(mask)
    parts = _parts(value)
    between = torch.where(same, value * parts, (value + before) / 2)
    return torch.where(mask, torch.where(blank, parts, between), value)


def disturbed(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Another parameter of about the same size: behind a gate that is zero, nothing is seen of samples."""
    if not parameter.is_floating_point():
        return parameter
    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
    return parameter + 0.1 * noise * (precise(parameter).square().mean().sqrt().to(parameter) or 1.0)


def _parts(value: Tensor) -> Tensor:
    """A half and three quarters in turn, for the entries of a sample, which its norm does not undo."""
    entries = math.prod(value.shape[1:])
    return (0.5 + torch.arange(entries, device=value.device) % 2 / 4).to(value.dtype).view(1, *value.shape[1:])


@dataclass(frozen=True)
class Batch:
    """The values of a call, and which of them have samples."""

    values: list[Any]
    have: list[bool]
    size: int

    @staticmethod
    def of(values: list[Any], size: int) -> Batch:
        return Batch([_known(v) for v in values], [has_samples(v, size) for v in values], size)

    def few(self) -> Batch:
        return replace(self._mapped(few), size=min(self.size, FEW))

    def turned(self) -> Batch | None:
        """Integers in reverse, if any: indices that happen to be the numbers of the samples need not be."""
        turned = self._mapped(lambda v: v if v.is_floating_point() or v.is_complex() else v.flip(0))
        pairs = zip(self.values, turned.values, strict=True)
        return turned if any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in pairs) else None

    def changed(self, mask: Tensor, gently: bool = False) -> list[Any]:
        return self._mapped(lambda v: with_others(v, mask, gently)).values

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        values = [function(v) if has else v for v, has in zip(self.values, self.have, strict=True)]
        return replace(self, values=values)


def _known(value: Any) -> Any:
    """With a number in place of what is missing, since nothing is seen of a mean over it."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
