"""The joint covariance of all entries that belong to one sample. Stores `C` of each sample: `[batch, n, n]`.

The entries of the mean, read in memory order, are `batch` runs of `n` entries; a run is one sample, and `C[b]` is the
joint covariance of run `b`. Merging the batch with the next dimension (`[B, T, D] -> [B*T, D]`) therefore changes
nothing, while moving the batch away from the front is not representable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from propagauss.errors import InputError
from propagauss.structures.protocol import Map, Value


class Full:
    """Memory quadratic in the entries of a sample."""

    name = "full"
    stores = "covariance"
    joint = True

    def __reduce__(self) -> str:  # copies and pickles are the same object
        return "FULL"

    def read(self, x: Value) -> Tensor:
        return x.covariance

    def variance(self, x: Value) -> Tensor:
        return x.stored.diagonal(dim1=-2, dim2=-1).reshape(x.mean.shape)

    def dense(self, x: Value) -> Tensor:
        return x.stored

    def samples(self, x: Value) -> Any:
        return x.stored.shape[0]

    def deviation(self, x: Value, standard: Tensor) -> Tensor:
        batch, n, _ = x.stored.shape
        draws = standard.shape[: standard.dim() - x.mean.dim()]
        root = symmetric_root(x.stored)
        return torch.einsum("bij,...bj->...bi", root, standard.reshape(*draws, batch, n)).reshape(standard.shape)

    def scaled(self, x: Value, factor: Tensor) -> Tensor:
        return _both_sides(x.stored, factor.expand_as(x.mean))

    def gated(self, x: Value, gate: Tensor) -> Tensor:
        return _both_sides(x.stored, gate.to(x.mean.dtype))

    def mapped(self, x: Value, linear: Map, squared: Map | None = None) -> Tensor:
        return self.mapped_rows(x, torch.vmap(linear))

    def mapped_rows(self, x: Value, linear: Map) -> Tensor:
        """`mapped` by a map that takes many tensors at once: `[r, *shape] -> [r, *new]`."""
        half = push_rows(x.stored, x.mean.shape, linear)  # [B, n, n']
        return push_rows(half.mT, x.mean.shape, linear)

    def split(self, x: Value, linear: Callable[[Tensor], Sequence[Tensor]], count: int) -> Sequence[Tensor]:
        return [self.mapped(x, lambda t, i=i: linear(t)[i]) for i in range(count)]

    def expanded(self, x: Value, shape: torch.Size) -> Tensor:
        """A value without a batch is one run of entries, shared by every sample."""
        lead = ((1,) * (len(shape) - x.mean.dim())) + tuple(x.mean.shape)
        inner = (lead[0], *shape[1:])
        expand = torch.vmap(lambda t: t.expand(inner))
        wide = push_rows(push_rows(x.stored, lead, expand).mT, lead, expand)
        batch = wide.shape[0] if lead[0] == shape[0] else shape[0]
        return wide.expand(batch, -1, -1)

    def reshaped(self, x: Value, shape: Sequence[Any]) -> Tensor:
        return x.stored

    def matched(self, x: Value, variance: Tensor, slope: Tensor | None) -> Tensor:
        assert slope is not None
        batch, n, _ = x.stored.shape
        extra = (variance - slope.square() * x.variance).clamp(min=0).reshape(batch, n)
        return self.scaled(x, slope) + torch.diag_embed(extra)

    def certain(self, x: Value, mean: Tensor) -> Tensor:
        batch: Any = x.stored.shape[0]
        batched = mean.dim() > 0 and mean.shape[0] == batch
        n = torch.Size(mean.shape[1:]).numel() if batched else mean.numel() // batch
        return mean.new_zeros(()).expand(batch, n, n)

    def plus(self, mean: Tensor, parts: Sequence[Value]) -> Tensor:
        first, *rest = parts
        total = first.covariance
        for part in rest:
            total = total + part.covariance
        return total

    def times(self, mean: Tensor, x: Value, y: Value) -> Tensor:
        a, b = x.expanded(mean.shape), y.expanded(mean.shape)
        c, d = a.covariance, b.covariance
        return _both_sides(c, b.mean) + _both_sides(d, a.mean) + c * d

    def joined(self, mean: Tensor, join: Callable[[list[Tensor]], Tensor], parts: Sequence[Value | Tensor]) -> Tensor:
        zeros = [torch.zeros_like(p if isinstance(p, Tensor) else p.mean) for p in parts]
        placed = [
            part.mapped(mean, lambda t, i=i: join([*zeros[:i], t, *zeros[i + 1 :]]))
            for i, part in enumerate(parts)
            if not isinstance(part, Tensor)
        ]
        return self.plus(mean, placed)

    def check_shape(self, mean: Tensor, stored: Tensor) -> None:
        batch = mean.shape[0] if mean.dim() else 1
        n = int(torch.Size(mean.shape[1:]).numel())
        if tuple(stored.shape) != (batch, n, n):
            raise InputError(
                f"covariance has shape {tuple(stored.shape)}; "
                f"a mean of shape {tuple(mean.shape)} needs [{batch}, {n}, {n}]"
            )

    def check_values(self, stored: Tensor) -> None:
        check_psd(stored, "covariance")


FULL = Full()


def _both_sides(covariance: Tensor, factor: Tensor) -> Tensor:
    """`D C D`, `D = diag(factor)`, with a factor for every entry of the mean."""
    batch, n, _ = covariance.shape
    factor = factor.reshape(batch, n)
    # in place on the fresh product: half the memory traffic
    return (covariance * factor.unsqueeze(-1)).mul_(factor.unsqueeze(-2))


def last_blocks(covariance: Tensor, shape: Sequence[Any]) -> Tensor:
    """Of joint covariances `[B, n, n]` those over the last dimension at each position: `[*shape, shape[-1]]`."""
    batch, *inner, width = shape
    positions = math.prod(inner)
    blocks = covariance.reshape(batch, positions, width, positions, width)
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(batch, *inner, width, width)


def push_rows(matrix: Tensor, shape: Sequence[Any], linear: Map) -> Tensor:
    """Apply `linear` to the second index of `matrix`: [B, r, n] -> [B, r, n']; tensors of `shape` hold [B, n]."""
    batch, rows, _ = matrix.shape
    stacked = matrix.transpose(0, 1).reshape(rows, *shape)
    pushed = linear(stacked)
    # math.prod, since torch.Size would fix open sizes
    width = math.prod(pushed.shape[1:]) // batch if batch else math.prod(pushed.shape[2:])
    return pushed.reshape(rows, batch, width).transpose(0, 1)


def symmetric_root(covariance: Tensor) -> Tensor:
    """A matrix `R` with `R Rᵀ = covariance`; works for singular covariances. [..., n, n]"""
    values, vectors = torch.linalg.eigh(_decomposable(covariance))
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).to(covariance.dtype)


def _decomposable(matrix: Tensor) -> Tensor:
    """Half precision in single: PyTorch decomposes no other."""
    return matrix.float() if matrix.dtype.itemsize < 4 else matrix


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
    if int(torch.linalg.cholesky_ex(_decomposable(matrix + shift)).info.amax()) == 0:
        return
    smallest = torch.linalg.eigvalsh(_decomposable(matrix)).amin().item()
    if smallest < -tolerance * matrix.shape[-1]:
        raise error(f"{name} is not positive semi-definite: smallest eigenvalue {smallest:.3g}")
