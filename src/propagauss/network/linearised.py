"""The linearised network: what `linearise` returns and users call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.chosen import ChosenGaussian
from propagauss.gaussian import Gaussian
from propagauss.network.plan import Plan
from propagauss.network.streamlined import WORKING_BYTES, Streamlined
from propagauss.structures import DIAGONAL, FULL
from propagauss.tracing.trace import Traced


@dataclass(frozen=True)
class Sensitivities:
    """What the backward walk from one output holds, for a single sample and a single entry of the output."""

    entries: int  # of the output, per sample
    values: int  # of the largest sensitivities that are alive together
    dtype: torch.dtype

    def bytes(self, entries: int) -> int:
        return entries * (self.values + self.entries) * self.dtype.itemsize


# How many samples go through together. Sensitivities should fit into the processor's cache; but all weights are read
# for every group of samples, so that a group has some, if they do not take more than a few times as much.
CACHE_BYTES = 2**22
GROUP, GROUP_BYTES = 64, 2**24
FEWEST = 4  # convolutions are much slower for a single image, and reorder their weights at every call


class Linearised(Streamlined):
    """A linearised network: `net(x)` is the `Gaussian` at the model's output, exact to first order in the parameters.

    Memory is bounded: large batches go through a few samples at a time and, for variances alone, large outputs a few
    entries at a time.
    """

    word = "linearised"

    def __init__(
        self, body: fx.GraphModule, plan: Plan, traced: Traced, walks: dict[int, Sensitivities], structure: str
    ):
        super().__init__(body, plan, traced)
        self.structure, self._walks = structure, walks
        self._all_rows = (None,) * len(walks)
        self._rows, self._at_once = self._sizes()

    def _sizes(self) -> tuple[int | None, int | None]:
        """How many entries of the output and how many samples go through together; None for all."""
        if not self._walks:
            return None, None
        largest = max(self._walks.values(), key=lambda w: w.bytes(w.entries))
        rows: int | None = None
        if self.structure == "diagonal" and len(self._walks) == 1 and largest.bytes(largest.entries) > WORKING_BYTES:
            rows = max(1, WORKING_BYTES // largest.bytes(1))
        if not self._is_divisible:
            return rows, None
        used = max(1, largest.bytes(rows or largest.entries))
        samples = max(FEWEST, CACHE_BYTES // used, min(GROUP, GROUP_BYTES // used))
        return rows, max(1, min(samples, WORKING_BYTES // used))

    @property
    def at_once(self) -> int | None:
        if self._rows is None or self._at_once is None:
            return self._at_once
        largest = max(walk.bytes(walk.entries) for walk in self._walks.values())  # a program does all entries together
        return max(1, WORKING_BYTES // largest)

    def _whole(self, leaves: list[Any]) -> tuple[Any, ...]:
        if self._rows is None or torch.compiler.is_compiling():
            return self._assembled(self.body.forward(*leaves, *self._all_rows))
        eye = getattr(self.body, f"whole_{next(iter(self._walks))}")
        parts = [self.body.forward(*leaves, rows) for rows in eye.split(self._rows)]
        (where,) = self._walks
        joined = list(parts[0])
        mean, _, *index = parts[0][where]
        joined[where] = (mean, torch.cat([p[where][1] for p in parts], -1), *index)
        return self._assembled(tuple(joined))

    def _assembled(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._gaussian(r) if isinstance(r, tuple) else r for r in results)

    def _gaussian(self, result: tuple[Any, ...]) -> Gaussian:
        mean, form, *index = result
        if index:
            return self._over_chosen(mean, form, index[0])
        if self.structure == "diagonal":
            return Gaussian.diagonal(mean, torch.zeros_like(mean) if form is None else form.reshape(mean.shape))
        if form is None:
            flat = mean.reshape(*(mean.shape[:1] or (1,)), -1)
            return Gaussian.full(mean, (flat * 0).unsqueeze(-1) * flat.unsqueeze(-2))
        return Gaussian.full(mean, form)

    def _over_chosen(self, mean: Tensor, form: Tensor | None, index: Tensor) -> Gaussian:
        """`form` is over the chosen entries of a sample, in the order of `index [B, ..., k]`."""
        if self.structure == "diagonal":
            return ChosenGaussian.over(
                mean, index, DIAGONAL, mean.new_zeros(index.shape) if form is None else form.reshape(index.shape)
            )
        if form is None:
            rows = math.prod(index.shape[1:])
            form = mean.new_zeros(mean.shape[0], rows, rows)
        return ChosenGaussian.over(mean, index, FULL, form)

    def __repr__(self) -> str:
        entries = sum(w.entries for w in self._walks.values())
        return f"Linearised({entries} outputs, {len(self.plan.parameters)} random parameters)"
