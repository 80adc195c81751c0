"""The value that flows through a streamlined network: a Gaussian over a tensor.

It is a mean, and a covariance in one of the structures of `propagauss.structures`. *Diagonal* keeps one variance per
entry. *Full* keeps the joint covariance of all entries that belong to one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.checks import generator as checked_generator
from propagauss.checks import kind, moved, number, tensor, whole
from propagauss.errors import InputError
from propagauss.structures import DIAGONAL, FULL, STRUCTURES, Structure
from propagauss.structures.full import check_psd, push_rows, symmetric_root

__all__ = ["Chosen", "Gaussian", "check_psd", "common", "mean_of", "push_rows", "symmetric_root"]


class Chosen(NamedTuple):
    """The entries that have a covariance, where only some have: `k` at each position of the last dimension."""

    index: Tensor  # [batch, ..., k], which entries of the last dimension
    mean: Tensor  # [batch, ..., k]
    covariance: Tensor  # [batch, ..., k, k] among those of one position, or variances [batch, ..., k]


class Gaussian:
    """A Gaussian over a tensor: its mean, and a variance per entry or a joint covariance per sample.

    Args:
        mean: any shape; the first dimension is the batch.
        variance: same shape as `mean`, not negative.
        covariance: `[batch, n, n]` with `n` the number of entries of one sample, symmetric positive semi-definite.
    """

    mean: Tensor
    kind: Structure  # how the covariance is stored
    stored: Tensor  # what that structure stores of it

    def __init__(self, mean: Tensor, variance: Tensor | None = None, *, covariance: Tensor | None = None):
        if (variance is None) == (covariance is None):
            raise InputError("a Gaussian takes either variance= (shape of the mean) or covariance= ([batch, n, n])")
        self.mean = mean
        if variance is not None:
            self.kind, self.stored = DIAGONAL, variance
        elif covariance is not None:
            self.kind, self.stored = FULL, covariance
        if not torch.compiler.is_compiling():
            tensor(mean, "the mean of a Gaussian")
            tensor(self.stored, f"the {self.kind.stores} of a Gaussian")
        self._check_form()
        if not torch.compiler.is_compiling():
            self._check_values()

    # -- what users read

    @property
    def variance(self) -> Tensor:
        """Variance of every entry, in the shape of the mean."""
        return self.kind.variance(self)

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of every entry, in the shape of the mean."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Joint covariance of the entries of each sample: `[batch, n, n]`."""
        return self.kind.dense(self)

    @property
    def chosen(self) -> Chosen | None:
        """The entries that have a covariance; None if all may have one (see `linearise(outputs=...)`)."""
        return None

    @property
    def is_full(self) -> bool:
        """Whether a joint covariance is stored, rather than variances only."""
        return self.kind.joint

    @property
    def structure(self) -> str:
        return self.kind.name

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def detach(self) -> Gaussian:
        return self.with_stored(self.mean.detach(), self.stored.detach())

    def to(self, *args: Any, **kwargs: Any) -> Gaussian:
        """Move or cast mean and covariance, as `Tensor.to` does."""
        return self.with_stored(moved(self.mean, *args, **kwargs), moved(self.stored, *args, **kwargs))

    def scale(self, factor: Tensor | float) -> Gaussian:
        """Same mean, covariance multiplied by `factor`."""
        if not isinstance(factor, Tensor):
            factor = number(factor, "the factor of a covariance", "a number that is not negative", lambda v: v >= 0)
        elif factor.dim() and not torch.compiler.is_compiling():
            raise InputError(f"the factor of a covariance is {kind(factor)}; it must be a single number")
        return self.with_stored(self.mean, self.stored * factor)

    def sample(self, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws of shape `[*shape, *mean.shape]`."""
        if not isinstance(shape, (tuple, list)):
            raise InputError(f"the shape of a sample is {kind(shape)}; give a tuple, such as (10,) for ten draws")
        shape = tuple(whole(n, "a size in the shape of a sample") for n in shape)
        generator = checked_generator(generator)
        standard = torch.randn((*shape, *self.mean.shape), generator=generator, dtype=self.dtype, device=self.device)
        return self.mean + self.kind.deviation(self, standard)

    def __repr__(self) -> str:
        return f"Gaussian(shape={tuple(self.mean.shape)}, structure={self.structure!r}, dtype={self.mean.dtype})"

    # -- what rules are written with; none of these checks its arguments

    @staticmethod
    def of(kind: Structure, mean: Tensor, stored: Tensor) -> Gaussian:
        g = object.__new__(Gaussian)
        g.mean, g.kind, g.stored = mean, kind, stored
        return g

    @staticmethod
    def diagonal(mean: Tensor, variance: Tensor) -> Gaussian:
        g = object.__new__(Gaussian)
        g.mean, g.kind, g.stored = mean, DIAGONAL, variance
        return g

    @staticmethod
    def full(mean: Tensor, covariance: Tensor) -> Gaussian:
        g = object.__new__(Gaussian)
        g.mean, g.kind, g.stored = mean, FULL, covariance
        return g

    def with_stored(self, mean: Tensor, stored: Tensor) -> Gaussian:
        """Another Gaussian in the same structure."""
        g = object.__new__(Gaussian)
        g.mean, g.kind, g.stored = mean, self.kind, stored
        return g

    def with_mean(self, mean: Tensor) -> Gaussian:
        """New mean of the same shape; same covariance."""
        return self.with_stored(mean, self.stored)

    def scaled(self, mean: Tensor, factor: Tensor) -> Gaussian:
        """New mean; every deviation multiplied by `factor` (broadcastable to this mean)."""
        return self.with_stored(mean, self.kind.scaled(self, factor))

    def gated(self, mean: Tensor, gate: Tensor) -> Gaussian:
        """New mean; deviations pass where `gate` (shape of the mean) is 1, and vanish where it is 0."""
        return self.with_stored(mean, self.kind.gated(self, gate))

    def mapped(
        self, mean: Tensor, linear: Callable[[Tensor], Tensor], squared: Callable[[Tensor], Tensor] | None = None
    ) -> Gaussian:
        """New mean; deviations go through a linear map that keeps samples apart.

        `linear` maps a tensor of this mean's shape to one of the new mean's; `squared` does the same with every
        coefficient squared, which is what variances need (by default the map itself: right for maps that only move
        entries around).
        """
        return self.with_stored(mean, self.kind.mapped(self, linear, squared))

    def mapped_rows(self, mean: Tensor, linear: Callable[[Tensor], Tensor]) -> Gaussian:
        """`mapped` in the full structure, with a map that takes many tensors at once: `[r, *shape] -> [r, *new]`."""
        return Gaussian.full(mean, FULL.mapped_rows(self, linear))

    def split(self, means: Sequence[Tensor], linear: Callable[[Tensor], Sequence[Tensor]]) -> tuple[Gaussian, ...]:
        """`mapped` for a map that deals the entries out to several results."""
        parts = self.kind.split(self, linear, len(means))
        return tuple(self.with_stored(mean, part) for mean, part in zip(means, parts, strict=True))

    def expanded(self, shape: torch.Size) -> Gaussian:
        """Broadcast to `shape`; copies of an entry are the same random number, so they stay fully correlated."""
        if self.mean.dim() == len(shape) and self.mean.shape == shape:  # an open batch is not to be compared with 2
            return self
        return self.with_stored(self.mean.expand(shape), self.kind.expanded(self, shape))

    def reshaped(self, shape: Sequence[Any]) -> Gaussian:
        """The same entries in the same order, in another shape."""
        return self.with_stored(self.mean.reshape(shape), self.kind.reshaped(self, shape))

    def matched(self, mean: Tensor, variance: Tensor, slope: Tensor | None) -> Gaussian:
        """These moments; deviations in common with other entries go through `slope` (shape of the mean).

        None will do where the structure keeps nothing in common.
        """
        return self.with_stored(mean, self.kind.matched(self, variance, slope))

    def certain(self, mean: Tensor) -> Gaussian:
        """A value without variance, with the samples and in the structure of this one."""
        return self.with_stored(mean, self.kind.certain(self, mean))

    @property
    def samples(self) -> Any:
        """How many samples are kept apart; 1 where the structure keeps none apart."""
        return self.kind.samples(self)

    # -- checks

    def _check_form(self) -> None:
        mean, stored = self.mean, self.stored
        if not mean.is_floating_point() or mean.dtype.itemsize < 2:
            raise InputError(f"a Gaussian needs a floating-point mean, got {mean.dtype}: convert it with .float()")
        if stored.dtype != mean.dtype or stored.device != mean.device:
            raise InputError(
                f"mean is {mean.dtype} on {mean.device} but the {self.kind.stores} is {stored.dtype} on "
                f"{stored.device}: convert one of them with .to()"
            )
        self.kind.check_shape(mean, stored)

    def _check_values(self) -> None:
        try:
            finite, negative = bool(self.stored.isfinite().all()), bool((self.variance < 0).any())
        except RuntimeError:  # values cannot be read under vmap or a symbolic trace
            return
        if not finite:
            raise InputError(f"the {self.kind.stores} has values that are not finite")
        if negative:
            raise InputError(
                f"the {self.kind.stores} has negative variances, smallest {self.variance.min().item():.3g}"
            )
        self.kind.check_values(self.stored)


def mean_of(x: Any) -> Any:
    """The mean of a Gaussian; a plain value as it is."""
    return x.mean if isinstance(x, Gaussian) else x


def common(values: Iterable[Any]) -> Structure:
    """The structure that can hold all of these values: a joint one if any is; plain values fit into each."""
    return FULL if any(isinstance(g, Gaussian) and g.kind.joint for g in values) else DIAGONAL


def _rebuild(tensors: Any, structure: Any) -> Gaussian:
    mean, stored = tensors
    return Gaussian.of(STRUCTURES[structure], mean, stored)


def _flatten_with_keys(g: Gaussian) -> Any:
    keys = (pytree.GetAttrKey("mean"), pytree.GetAttrKey(g.kind.stores))
    return list(zip(keys, (g.mean, g.stored), strict=True)), g.structure


pytree.register_pytree_node(
    Gaussian,
    lambda g: ([g.mean, g.stored], g.structure),
    _rebuild,
    serialized_type_name="propagauss.Gaussian",
    flatten_with_keys_fn=_flatten_with_keys,
)
