"""A Gaussian of which only some entries are uncertain: `linearise(..., outputs=...)` returns it.

At each position (all dimensions but the last) `k` entries of the last dimension are chosen. They have a covariance; all
other entries have none. Nothing is stored for these, so that a vocabulary of 50,000 costs no more than its mean.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.gaussian import Chosen, Gaussian
from propagauss.structures import STRUCTURES, Structure
from propagauss.structures.full import last_blocks

MOST_DENSE = 2048  # entries of a sample whose joint covariance is filled up with zeros if it is asked for


class ChosenGaussian(Gaussian):
    """A mean of any size, and a Gaussian `part [batch, ..., k]` over the entries `index [batch, ..., k]` of it.

    To everything else it is a Gaussian in the structure of its part, filled up with zeros where that is asked for.
    """

    index: Tensor
    part: Gaussian

    @staticmethod
    def over(mean: Tensor, index: Tensor, kind: Structure, stored: Tensor) -> ChosenGaussian:
        """`stored` is what the structure `kind` stores for the chosen entries."""
        g = object.__new__(ChosenGaussian)
        g.mean, g.index = mean, index
        g.part = Gaussian.of(kind, mean.gather(-1, index), stored)
        return g

    @property
    def kind(self) -> Structure:  # type: ignore[override]
        return self.part.kind

    @property
    def stored(self) -> Tensor:  # type: ignore[override]
        return self.covariance if self.kind.joint else self.variance

    @property
    def variance(self) -> Tensor:
        """Variance of every entry, in the shape of the mean; 0 where it was not chosen."""
        return self._placed(self.part.variance)

    @property
    def covariance(self) -> Tensor:
        """Joint covariance of the entries of each sample, `[batch, n, n]`, zeros included; for small samples only."""
        n = math.prod(int(size) for size in self.mean.shape[1:])
        if n > MOST_DENSE:
            gigabytes = n**2 * self.dtype.itemsize / 2**30
            raise InputError(
                f"the joint covariance of all {n:,} entries would take {gigabytes:,.1f} GiB for each sample, nearly "
                "all of it zeros: read latent.chosen (index, mean, covariance), or latent.variance"
            )
        return _filled(self.part.covariance, self._entries(), n)

    @property
    def chosen(self) -> Chosen:
        covariance = self.part.variance
        if self.kind.joint:
            covariance = last_blocks(self.part.stored, self.index.shape)
        return Chosen(self.index, self.part.mean, covariance)

    def detach(self) -> ChosenGaussian:
        return self._like(self.mean.detach(), self.part.stored.detach())

    def to(self, *args: Any, **kwargs: Any) -> ChosenGaussian:
        return self._like(self.mean.to(*args, **kwargs), self.part.stored.to(*args, **kwargs))

    def scale(self, factor: Tensor | float) -> ChosenGaussian:
        return self._like(self.mean, self.part.stored * factor)

    def sample(self, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        drawn = self.part.sample(shape, generator)
        index = self.index.expand(drawn.shape)
        return self.mean.expand(*shape, *self.mean.shape).scatter(-1, index, drawn)

    def __repr__(self) -> str:
        counts = f"{self.index.shape[-1]} of {self.mean.shape[-1]}"
        return f"{super().__repr__()[:-1]}, chosen={counts!r})"

    def _like(self, mean: Tensor, stored: Tensor) -> ChosenGaussian:
        return ChosenGaussian.over(mean, self.index.to(mean.device), self.kind, stored)

    def _placed(self, values: Tensor) -> Tensor:
        """Values of the chosen entries among zeros, in the shape of the mean."""
        return torch.zeros_like(self.mean).scatter(-1, self.index, values)

    def _entries(self) -> Tensor:
        """Where the chosen entries are in a flattened sample: `[batch, K]`."""
        *inner, width = self.mean.shape[1:]
        starts = torch.arange(0, math.prod(inner) * width, width, device=self.index.device)
        return (self.index + starts.reshape(*inner, 1)).flatten(1)


def _filled(covariance: Tensor, entries: Tensor, n: int) -> Tensor:
    """`[B, K, K]` among zeros, at the rows and columns `entries [B, K]` of `[B, n, n]`."""
    batch, k = entries.shape
    columns = covariance.new_zeros(batch, k, n).scatter(-1, entries.unsqueeze(1).expand(-1, k, -1), covariance)
    return covariance.new_zeros(batch, n, n).scatter(1, entries.unsqueeze(-1).expand(-1, -1, n), columns)


def _rebuild(tensors: Any, structure: Any) -> ChosenGaussian:
    mean, index, stored = tensors
    return ChosenGaussian.over(mean, index, STRUCTURES[structure], stored)


def _flatten_with_keys(g: ChosenGaussian) -> Any:
    keys = (pytree.GetAttrKey(name) for name in ("mean", "index", g.kind.stores))
    return list(zip(keys, (g.mean, g.index, g.part.stored), strict=True)), g.structure


pytree.register_pytree_node(
    ChosenGaussian,
    lambda g: ([g.mean, g.index, g.part.stored], g.structure),
    _rebuild,
    serialized_type_name="propagauss.ChosenGaussian",
    flatten_with_keys_fn=_flatten_with_keys,
)
