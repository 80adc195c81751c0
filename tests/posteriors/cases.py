"""Random posteriors of every structure, each with its dense covariance worked out by brute force; what tests share."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import propagauss as pg
from propagauss.posteriors import SpectralPosterior
from reference import random_psd

KINDS = ("diagonal", "kronecker", "kronecker factored", "full", "low rank")
STRUCTURES = (*KINDS, "spectral")  # to a layer, spectral is full
PRIOR_PRECISION = 1.7


def kronecker_factors(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
    """`(B, A)` for a matrix (later dimensions flattened), `(B,)` for a vector."""
    sizes = (shape.numel(),) if len(shape) < 2 else (shape[0], shape[1:].numel())
    return tuple(random_psd(n, scale=1.5, generator=generator) for n in sizes)


def kronecker_covariance(factors: tuple[Tensor, ...], precision: float, damping: str) -> Tensor:
    """`(B⊗A + δI)⁻¹`, or the paper's `(B+√δI)⁻¹ ⊗ (A+√δI)⁻¹`."""
    if damping == "factored" and len(factors) == 2:
        inverses = [torch.linalg.inv(f + math.sqrt(precision) * torch.eye(len(f), dtype=f.dtype)) for f in factors]
        return torch.kron(*inverses)
    curvature = torch.kron(*factors) if len(factors) == 2 else factors[0]
    return torch.linalg.inv(curvature + precision * torch.eye(len(curvature), dtype=curvature.dtype))


def make_posterior(
    kind: str, parameters: Mapping[str, Tensor], scale: float = 1.0, seed: int = 0
) -> tuple[pg.Posterior, Tensor]:
    """A posterior over `parameters` and its dense covariance (in their order, each flattened row by row)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(iter(parameters.values())).dtype
    posterior: pg.Posterior
    if kind == "diagonal":
        variances = {
            n: 0.1 + torch.rand(p.shape, generator=generator, dtype=torch.float64) for n, p in parameters.items()
        }
        posterior, dense = pg.DiagonalPosterior(variances), torch.cat([v.flatten() for v in variances.values()]).diag()
    elif kind.startswith("kronecker"):
        damping = "factored" if kind.endswith("factored") else "exact"
        factors = {n: kronecker_factors(p.shape, generator) for n, p in parameters.items()}
        posterior = pg.KroneckerPosterior(factors, PRIOR_PRECISION, damping=damping)
        dense = torch.block_diag(*(kronecker_covariance(f, PRIOR_PRECISION, damping) for f in factors.values()))
    elif kind == "low rank":
        own = {n: 0.1 + torch.rand(p.shape, generator=generator, dtype=torch.float64) for n, p in parameters.items()}
        along = {n: torch.randn((3, *p.shape), generator=generator, dtype=torch.float64) for n, p in parameters.items()}
        posterior, flat = pg.LowRankPosterior(own, along), torch.cat([d.flatten(1) for d in along.values()], 1)
        dense = torch.cat([v.flatten() for v in own.values()]).diag() + flat.mT @ flat
    elif kind == "spectral":
        size, rest = sum(p.numel() for p in parameters.values()), 0.8
        columns = torch.randn(size, size // 3, generator=generator, dtype=torch.float64)
        v, variances = torch.linalg.qr(columns).Q, 0.1 + torch.rand(size // 3, generator=generator, dtype=torch.float64)
        posterior = SpectralPosterior(list(parameters), v, variances, rest)
        dense = v @ variances.diag() @ v.mT + rest * (torch.eye(size, dtype=torch.float64) - v @ v.mT)
    else:
        dense = random_psd(sum(p.numel() for p in parameters.values()), generator=generator)
        posterior = pg.FullPosterior(list(parameters), dense)
    return posterior.scale(scale).to(dtype), dense * scale


class Largest(TorchDispatchMode):
    """The most entries of any tensor that is made inside."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor):
                # a broadcast view holds only what it stores
                self.entries = max(self.entries, min(t.numel(), t.untyped_storage().nbytes() // t.element_size()))
        return result
