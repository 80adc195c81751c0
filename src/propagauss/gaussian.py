"""The value that flows through a streamlined network: a Gaussian over a tensor.

Two structures. *Diagonal* keeps one variance per entry. *Full* keeps the joint covariance of all entries that belong to
one sample. In the full structure the entries of `mean`, read in memory order, are `batch` runs of `n` entries; a run is
one sample, and `covariance[b]` is the joint covariance of run `b`. Merging the batch with the next dimension
(`[B, T, D] -> [B*T, D]`) therefore changes nothing, while moving the batch away from the front is not representable.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.errors import InputError


class Gaussian:
    """A Gaussian over a tensor: its mean, and a variance per entry or a joint covariance per sample.

    Args:
        mean: any shape; the first dimension is the batch.
        variance: same shape as `mean`, not negative.
        covariance: `[batch, n, n]` with `n` the number of entries of one sample, symmetric positive semi-definite.
    """

    mean: Tensor
    _variance: Tensor | None
    _covariance: Tensor | None

    def __init__(self, mean: Tensor, variance: Tensor | None = None, *, covariance: Tensor | None = None):
        if (variance is None) == (covariance is None):
            raise InputError("a Gaussian takes either variance= (shape of the mean) or covariance= ([batch, n, n])")
        self.mean = mean
        self._variance = variance
        self._covariance = covariance
        self._check_form()
        if not torch.compiler.is_compiling():
            self._check_values()

    # -- what users read

    @property
    def variance(self) -> Tensor:
        """Variance of every entry, in the shape of the mean."""
        if self._variance is not None:
            return self._variance
        assert self._covariance is not None
        return self._covariance.diagonal(dim1=-2, dim2=-1).reshape(self.mean.shape)

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of every entry, in the shape of the mean."""
        return self.variance.sqrt()

    @property
    def covariance(self) -> Tensor:
        """Joint covariance of the entries of each sample: `[batch, n, n]`."""
        if self._covariance is not None:
            return self._covariance
        assert self._variance is not None
        v = self._variance.unsqueeze(-1) if self._variance.dim() < 2 else self._variance
        return torch.diag_embed(v.flatten(1))

    @property
    def is_full(self) -> bool:
        """Whether a joint covariance is stored, rather than variances only."""
        return self._covariance is not None

    @property
    def structure(self) -> str:
        return "full" if self.is_full else "diagonal"

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def detach(self) -> "Gaussian":
        return _rebuild([t.detach() for t in _tensors(self)], self.structure)

    def to(self, *args: Any, **kwargs: Any) -> "Gaussian":
        """Move or cast mean and covariance, as `Tensor.to` does."""
        return _rebuild([t.to(*args, **kwargs) for t in _tensors(self)], self.structure)

    def scale(self, factor: "Tensor | float") -> "Gaussian":
        """Same mean, covariance multiplied by `factor`."""
        mean, spread = _tensors(self)
        return _rebuild([mean, spread * factor], self.structure)

    def sample(self, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """Draws of shape `[*shape, *mean.shape]`."""
        noise = torch.randn((*shape, *self.mean.shape), generator=generator, dtype=self.dtype, device=self.device)
        if self._covariance is None:
            return self.mean + noise * self.stddev
        batch, n, _ = self._covariance.shape
        root = symmetric_root(self._covariance)
        deviation = torch.einsum("bij,...bj->...bi", root, noise.reshape(*shape, batch, n))
        return self.mean + deviation.reshape(*shape, *self.mean.shape)

    def __repr__(self) -> str:
        return f"Gaussian(shape={tuple(self.mean.shape)}, structure={self.structure!r}, dtype={self.mean.dtype})"

    # -- what rules are written with; none of these checks its arguments

    @staticmethod
    def diagonal(mean: Tensor, variance: Tensor) -> "Gaussian":
        g = object.__new__(Gaussian)
        g.mean, g._variance, g._covariance = mean, variance, None
        return g

    @staticmethod
    def full(mean: Tensor, covariance: Tensor) -> "Gaussian":
        g = object.__new__(Gaussian)
        g.mean, g._variance, g._covariance = mean, None, covariance
        return g

    def with_mean(self, mean: Tensor) -> "Gaussian":
        """New mean of the same shape; same spread."""
        return _rebuild([mean, _tensors(self)[1]], self.structure)

    def scaled(self, mean: Tensor, factor: Tensor) -> "Gaussian":
        """New mean; every deviation multiplied by `factor` (broadcastable to this mean)."""
        if self._covariance is None:
            return Gaussian.diagonal(mean, self.variance * factor.square())
        batch, n, _ = self._covariance.shape
        factor = factor.expand_as(self.mean).reshape(batch, n)
        # in place on the fresh product: half the memory traffic
        return Gaussian.full(mean, (self._covariance * factor.unsqueeze(-1)).mul_(factor.unsqueeze(-2)))

    def mapped(
        self, mean: Tensor, linear: Callable[[Tensor], Tensor], squared: Callable[[Tensor], Tensor] | None = None
    ) -> "Gaussian":
        """New mean; deviations go through a linear map that keeps samples apart.

        `linear` maps a tensor of this mean's shape to one of the new mean's; `squared` does the same with every
        coefficient squared, which is what variances need (by default the map itself: right for maps that only move
        entries around).
        """
        if self._covariance is None:
            return Gaussian.diagonal(mean, (squared or linear)(self.variance))
        return self.mapped_rows(mean, torch.vmap(linear))

    def mapped_rows(self, mean: Tensor, linear: Callable[[Tensor], Tensor]) -> "Gaussian":
        """`mapped` in the full structure, with a map that takes many tensors at once: `[r, *shape] -> [r, *new]`."""
        assert self._covariance is not None
        half = push_rows(self._covariance, self.mean.shape, linear)  # [B, n, n']
        return Gaussian.full(mean, push_rows(half.mT, self.mean.shape, linear))

    def expanded(self, shape: torch.Size) -> "Gaussian":
        """Broadcast to `shape`; copies of an entry are the same random number, so they stay fully correlated."""
        if self.mean.shape == shape:
            return self
        if self._covariance is None:
            return Gaussian.diagonal(self.mean.expand(shape), self.variance.expand(shape))
        lead = self.mean.reshape((1,) * (len(shape) - self.mean.dim()) + tuple(self.mean.shape))
        unit = Gaussian.full(lead, self._covariance)
        inner = (lead.shape[0], *shape[1:])
        wide = unit.mapped(lead.expand(inner), lambda t: t.expand(inner))
        assert wide._covariance is not None
        n = wide._covariance.shape[-1]
        batch = wide._covariance.shape[0] if lead.shape[0] == shape[0] else shape[0]
        return Gaussian.full(lead.expand(shape), wide._covariance.expand(batch, n, n))

    # -- checks

    def _check_form(self) -> None:
        mean, spread = _tensors(self)
        if not mean.is_floating_point():
            raise InputError(f"a Gaussian needs a floating-point mean, got {mean.dtype}")
        if spread.dtype != mean.dtype or spread.device != mean.device:
            raise InputError(
                f"mean is {mean.dtype} on {mean.device} but the {self._spread_name()} is {spread.dtype} on "
                f"{spread.device}: convert one of them with .to()"
            )
        if self._covariance is None:
            if spread.shape != mean.shape:
                raise InputError(
                    f"variance has shape {tuple(spread.shape)}, the mean {tuple(mean.shape)}: they must agree"
                )
            return
        batch = mean.shape[0] if mean.dim() else 1
        n = int(torch.Size(mean.shape[1:]).numel())
        if tuple(spread.shape) != (batch, n, n):
            raise InputError(
                f"covariance has shape {tuple(spread.shape)}; "
                f"a mean of shape {tuple(mean.shape)} needs [{batch}, {n}, {n}]"
            )

    def _check_values(self) -> None:
        spread = _tensors(self)[1]
        try:
            finite, negative = bool(spread.isfinite().all()), bool((self.variance < 0).any())
        except RuntimeError:  # values cannot be read under vmap or a symbolic trace
            return
        if not finite:
            raise InputError(f"the {self._spread_name()} has values that are not finite")
        if negative:
            raise InputError(
                f"the {self._spread_name()} has negative variances, smallest {self.variance.min().item():.3g}"
            )
        if self._covariance is not None:
            check_psd(self._covariance, "covariance")

    def _spread_name(self) -> str:
        return "covariance" if self.is_full else "variance"


def mean_of(x: Any) -> Any:
    """The mean of a Gaussian; a plain value as it is."""
    return x.mean if isinstance(x, Gaussian) else x


def check_psd(matrix: Tensor, name: str, error: type[Exception] = InputError) -> None:
    """Raise unless `matrix` ([..., n, n]) is symmetric and positive semi-definite up to rounding."""
    if matrix.numel() == 0:
        return
    matrix = matrix.detach()
    size = matrix.abs().amax().item()
    tolerance = 1e3 * torch.finfo(matrix.dtype).eps * max(size, torch.finfo(matrix.dtype).tiny)
    asymmetry = (matrix - matrix.mT).abs().amax().item()
    if asymmetry > tolerance:
        raise error(f"{name} is not symmetric: entries differ from the transpose by up to {asymmetry:.3g}")
    shift = tolerance * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    if int(torch.linalg.cholesky_ex(matrix + shift).info.amax()) == 0:
        return
    smallest = torch.linalg.eigvalsh(matrix).amin().item()
    if smallest < -tolerance * matrix.shape[-1]:
        raise error(f"{name} is not positive semi-definite: smallest eigenvalue {smallest:.3g}")


def symmetric_root(covariance: Tensor) -> Tensor:
    """A matrix `R` with `R Rᵀ = covariance`; works for singular covariances. [..., n, n]"""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def push_rows(matrix: Tensor, shape: torch.Size, linear: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `linear` to the second index of `matrix`: [B, r, n] -> [B, r, n']; tensors of `shape` hold [B, n]."""
    batch, rows, _ = matrix.shape
    stacked = matrix.transpose(0, 1).reshape(rows, *shape)
    pushed = linear(stacked)
    # math.prod, since torch.Size would fix open sizes
    width = math.prod(pushed.shape[1:]) // batch if batch else math.prod(pushed.shape[2:])
    return pushed.reshape(rows, batch, width).transpose(0, 1)


def _tensors(g: Gaussian) -> list[Tensor]:
    spread = g._covariance if g._covariance is not None else g._variance
    assert spread is not None
    return [g.mean, spread]


def _rebuild(tensors: Any, structure: Any) -> Gaussian:
    mean, spread = tensors
    return Gaussian.full(mean, spread) if structure == "full" else Gaussian.diagonal(mean, spread)


def _flatten_with_keys(g: Gaussian) -> Any:
    keys = (pytree.GetAttrKey("mean"), pytree.GetAttrKey(g._spread_name()))
    return list(zip(keys, _tensors(g), strict=True)), g.structure


pytree.register_pytree_node(
    Gaussian,
    lambda g: (_tensors(g), g.structure),
    _rebuild,
    serialized_type_name="propagauss.Gaussian",
    flatten_with_keys_fn=_flatten_with_keys,
)
