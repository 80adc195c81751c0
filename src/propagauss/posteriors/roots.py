"""Roots of posterior covariances: `R` with `Σ = R Rᵀ`, applied to Jacobians, `J Σ Jᵀ = (J R)(J R)ᵀ`.

As modules, so that their tensors belong to the network that uses them. A posterior without covariances between its
parameters has a root for each of them; others have one for all of their parameters together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.full import FullPosterior, symmetric_root
from propagauss.posteriors.kronecker import Eigenfactors, KroneckerPosterior
from propagauss.posteriors.low_rank import LowRankPosterior
from propagauss.posteriors.spectral import SpectralPosterior


class Root(nn.Module):
    """From Jacobians `[K, B, *shape]` of some parameters to `J R [K, B, rank]`."""

    def forward(self, *jacobians: Tensor) -> Tensor:
        raise NotImplementedError


class DiagonalRoot(Root):
    """`J √v`"""

    deviation: Tensor

    def __init__(self, variance: Tensor):
        super().__init__()
        self.register_buffer("deviation", variance.sqrt())

    def forward(self, jacobian: Tensor) -> Tensor:
        return (jacobian * self.deviation).reshape(*jacobian.shape[:2], -1)


class KroneckerRoot(Root):
    """`Q_Bᵀ J Q_A √v` with the variances `v` of the rotated entries."""

    left: Tensor
    right: Tensor | None
    deviation: Tensor

    def __init__(self, factors: Eigenfactors):
        super().__init__()
        self.register_buffer("left", factors.left.clone())
        self.register_buffer("right", None if factors.right is None else factors.right.clone())
        self.register_buffer("deviation", factors.variance.sqrt())

    def forward(self, jacobian: Tensor) -> Tensor:
        j = jacobian.reshape(*jacobian.shape[:2], *self.deviation.shape)
        j = j @ self.left if self.right is None else self.left.mT @ (j @ self.right)
        return (j * self.deviation).flatten(2)


class DenseRoot(Root):
    """`J R` for a dense root of the joint covariance of all parameters."""

    root: Tensor

    def __init__(self, covariance: Tensor):
        super().__init__()
        self.register_buffer("root", symmetric_root(covariance))

    def forward(self, *jacobians: Tensor) -> Tensor:
        return _joined(jacobians) @ self.root


class SpectralRoot(Root):
    """`[J V √s, √r (J - J V Vᵀ)]`; nothing is left for the second part where `V` has all directions."""

    vectors: Tensor
    deviations: Tensor
    dropped: Tensor | None

    def __init__(self, vectors: Tensor, variances: Tensor, rest: float, kept: Tensor):
        super().__init__()
        self.rest = rest**0.5
        self.register_buffer("vectors", vectors[kept])
        self.register_buffer("deviations", variances.sqrt())
        self.spans_all = vectors.shape[0] == vectors.shape[1]
        is_whole = len(kept) == len(vectors) or self.spans_all
        self.register_buffer("dropped", None if is_whole else vectors[_others(kept, len(vectors))])

    def forward(self, *jacobians: Tensor) -> Tensor:
        j = _joined(jacobians)
        along = j @ self.vectors
        if self.spans_all:
            return along * self.deviations
        across = [j - along @ self.vectors.mT]
        if self.dropped is not None:
            across.append(-along @ self.dropped.mT)
        return torch.cat([along * self.deviations, *(self.rest * a for a in across)], -1)


class LowRankRoot(Root):
    """`[J √v, Σ_names J Dᵀ]`"""

    deviation: Tensor
    directions: Tensor

    def __init__(self, posterior: LowRankPosterior):
        super().__init__()
        names = posterior.names
        self.register_buffer("deviation", torch.cat([posterior.own_variance(n).flatten() for n in names]).sqrt())
        rows = torch.cat([posterior.directions(n).reshape(posterior.rank, -1) for n in names], 1)
        self.register_buffer("directions", rows.mT.contiguous())

    def forward(self, *jacobians: Tensor) -> Tensor:
        j = _joined(jacobians)
        return torch.cat([j * self.deviation, j @ self.directions], -1)


def _joined(jacobians: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([j.reshape(*j.shape[:2], -1) for j in jacobians], -1)


def _others(kept: Tensor, count: int) -> Tensor:
    left = torch.ones(count, dtype=torch.bool, device=kept.device)
    left[kept] = False
    return left.nonzero().flatten()


def _spectral(p: SpectralPosterior) -> Root:
    return SpectralRoot(p._matrix, p._variances, p._rest, p._index())


_SEPARATE: dict[type[Posterior], Callable[[Any, str], Root]] = {
    DiagonalPosterior: lambda p, name: DiagonalRoot(p.variance(name)),
    KroneckerPosterior: lambda p, name: KroneckerRoot(p._factors[name]),
}
_JOINT: dict[type[Posterior], Callable[[Any], Root]] = {
    FullPosterior: lambda p: DenseRoot(p.to_dense()),
    SpectralPosterior: _spectral,
    LowRankPosterior: LowRankRoot,
}


def own_root(posterior: Posterior, name: str) -> Root | None:
    """The root of one parameter; None if it may depend on others."""
    separate = _SEPARATE.get(type(posterior))
    return None if separate is None else separate(posterior, name)


def joint_root(posterior: Posterior, used: list[str]) -> tuple[tuple[str, ...], Root]:
    """The root of the parameters `used` together, and their names in the order in which it takes their Jacobians."""
    kept = posterior.select(*used) if set(used) != set(posterior.names) else posterior
    joint = _JOINT.get(type(posterior))
    return kept.names, joint(kept) if joint is not None else DenseRoot(kept.to_dense())
