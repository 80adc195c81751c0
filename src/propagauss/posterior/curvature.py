"""The generalised Gauss-Newton matrix of a model, as a diagonal, as Kronecker factors, or dense.

    H = Σ_n J_nᵀ Λ_n J_n = Σ_n Σ_c r_nc r_ncᵀ,    r_nc = J_nᵀ s_nc

with `Λ_n = Σ_c s_nc s_ncᵀ` the Hessian of the loss of sample `n` in its outputs (the rest is in gradients.py). Each
class holds one structure: `add` takes a batch, `eigenvalues` serves the choice of the prior, `posterior` adds the prior
and inverts. Sums are kept in double precision.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from propagauss.errors import InputError
from propagauss.posterior.base import Posterior
from propagauss.posterior.capture import Layer, Use
from propagauss.posterior.diagonal import DiagonalPosterior
from propagauss.posterior.full import FullPosterior
from propagauss.posterior.gradients import BUDGET, Batch, Forward, as_stored, per_sample_gradients
from propagauss.posterior.kronecker import Eigenfactors, KroneckerPosterior


class DiagonalCurvature:
    """`diag(H)`, exact."""

    def __init__(self, forward: Forward):
        self.forward, self.names = forward, forward.chosen
        self._sums = {n: torch.zeros_like(forward.parameters[n], dtype=torch.float64) for n in self.names}

    def add(self, batch: Batch) -> None:
        quick = {n: u[0] for n, u in batch.direct.items() if len(u) == 1 and u[0].rows == batch.size}
        self._add_single_rows(batch, quick)
        rest = [n for n in self.names if n not in quick]
        for gradients in per_sample_gradients(batch, rest) if rest else ():
            for name, g in gradients.items():
                self._sums[name] += g.square().sum(0)

    def _add_single_rows(self, batch: Batch, quick: dict[str, Use]) -> None:
        """A layer applied once per sample has `r = g aᵀ`, so `Σ_c r²` is `(Σ_c g²) (a²)ᵀ`: one product for all."""
        uses = [u for u in batch.seen.uses if any(u is q for q in quick.values())]
        squares: list[Tensor] = []
        for gradients in batch.pull(uses):
            new = [g.square() for g in gradients]
            squares = [s.add_(n) for s, n in zip(squares, new, strict=True)] if squares else new
        for use, s in zip(uses, squares, strict=bool(squares)):
            if use.weight is not None and quick.get(use.weight) is use:
                a = use.layer.inputs(use.layer.input).square()
                total = self._sums[use.weight]
                total += as_stored(torch.einsum("ngo,ngi->goi", s, a), use.layer).reshape(total.shape)
            if use.bias is not None and quick.get(use.bias) is use:
                self._sums[use.bias] += s.sum(0).reshape(self._sums[use.bias].shape)

    def eigenvalues(self) -> np.ndarray:
        return torch.cat([s.flatten() for s in self._sums.values()]).cpu().numpy()

    def posterior(self, prior_precision: float, noise: float) -> Posterior:
        """`1 / (diag(H) / σ² + δ)`"""
        dtype = self.forward.parameters[self.names[0]].dtype
        return DiagonalPosterior({n: (1 / (s / noise**2 + prior_precision)).to(dtype) for n, s in self._sums.items()})


@dataclass
class _Sums:
    """Over the rows of one layer: `Σ a aᵀ` (None for a bias alone), `Σ_c Σ g gᵀ`, and the number of rows."""

    layer: Layer
    b: Tensor  # [out, out]
    a: Tensor | None = None  # [in, in]
    rows: int = 0


class KroneckerCurvature:
    """KFAC: `H ≈ B ⊗ A` for a weight, `B` for a bias, `A = mean(a aᵀ)` and `B = Σ_c Σ g gᵀ` over rows.

    A row is one sample at one position, so a layer applied to sequences, to images or several times gets the "expand"
    form of KFAC, which leaves out products between different positions. In a grouped convolution the groups share `A`
    and `B` has one block per group.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self._sums: dict[tuple[str | None, str | None], _Sums] = {}
        self._unfit: set[str] = set()

    def add(self, batch: Batch) -> None:
        self._unfit |= batch.seen.others
        uses = batch.seen.uses
        for use in uses:
            self._add_inputs(use)
        for gradients in batch.pull(uses):
            for use, g in zip(uses, gradients, strict=True):
                blocks = torch.einsum("ngo,ngp->gop", g, g)
                self._sums[use.weight, use.bias].b += torch.block_diag(*blocks)

    def _add_inputs(self, use: Use) -> None:
        layer, key = use.layer, (use.weight, use.bias)
        if key not in self._sums:
            square = torch.zeros(layer.out, layer.out, dtype=torch.float64, device=use.probe.device)
            self._sums[key] = _Sums(layer, square)
        sums = self._sums[key]
        if (layer.stored, layer.groups) != (sums.layer.stored, sums.layer.groups):
            self._unfit |= {n for n in key if n is not None}
        if use.weight is None:
            return
        # image patches are many times larger than the image
        width = layer.weight.numel() // layer.out * layer.groups * use.rows * use.probe.element_size()
        for part in layer.input.split(max(1, BUDGET * layer.input.shape[0] // max(width, 1))):
            a = layer.inputs(part).flatten(0, 1)  # [rows * G, in]
            sums.a = (a.mT @ a).double() if sums.a is None else sums.a + a.mT @ a
            sums.rows += a.shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen parameters that are weights or biases of linear maps, and nothing else."""
        seen = {n for key in self._sums for n in key} - self._unfit
        return tuple(n for n in self.forward.chosen if n in seen)

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """`(B, A)` of a weight, `(B,)` of a bias; `(A, B)` for a weight stored as [in, out]."""
        keys = [key for key in self._sums if name in key]
        b = self._sums[keys[0]].b if len(keys) == 1 else torch.stack([self._sums[k].b for k in keys]).sum(0)
        mine = [self._sums[key] for key in keys if key[0] == name]
        if not mine:
            return (b,)
        a = torch.stack([s.a for s in mine if s.a is not None]).sum(0) / sum(s.rows for s in mine)
        return (b, a) if mine[0].layer.stored == "[out, in]" else (a, b)

    @cached_property
    def _eigen(self) -> dict[str, tuple[list[Tensor], Tensor]]:
        """Per name the eigenvectors of the factors, and the eigenvalues of `H` in the shape of the weight."""
        factors = {name: self.factors(name) for name in self.names}
        distinct = {id(f): f for fs in factors.values() for f in fs}  # a weight and its bias share B
        solved = {key: torch.linalg.eigh(f) for key, f in distinct.items()}
        parts = {}
        for name, fs in factors.items():
            values = [solved[id(f)].eigenvalues.clamp(min=0) for f in fs]
            h = values[0] if len(values) == 1 else torch.outer(*values)
            parts[name] = [solved[id(f)].eigenvectors for f in fs], h
        return parts

    def eigenvalues(self) -> np.ndarray:
        return torch.cat([h.flatten() for _, h in self._eigen.values()]).cpu().numpy()

    def posterior(self, prior_precision: float, noise: float) -> Posterior:
        """`(B ⊗ A / σ² + δ I)⁻¹`, exactly"""
        dtype = self.forward.parameters[self.names[0]].dtype
        factors = {}
        for name, (vectors, h) in self._eigen.items():
            right = vectors[1] if len(vectors) > 1 else None
            factors[name] = Eigenfactors(vectors[0], right, 1 / (h / noise**2 + prior_precision))
        return KroneckerPosterior.from_eigen({n: f.map(lambda t: t.to(dtype)) for n, f in factors.items()})


class FullCurvature:
    """Dense `H` over all chosen parameters, each flattened row by row, exact."""

    def __init__(self, forward: Forward):
        self.forward, self.names = forward, forward.chosen
        size = sum(forward.size(n) for n in self.names)
        first = forward.parameters[self.names[0]]
        # H, its eigenvectors, the covariance and the workspace of the eigendecomposition
        require_memory(4 * 8 * size**2, f"a full covariance over {size} parameters", first.device)
        self._matrix = torch.zeros(size, size, dtype=torch.float64, device=first.device)

    def add(self, batch: Batch) -> None:
        for gradients in per_sample_gradients(batch, list(self.names)):
            rows = torch.cat([gradients[n].flatten(1) for n in self.names], dim=1)
            self._matrix += rows.mT @ rows

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self._matrix)
        return values.clamp(min=0), vectors

    def eigenvalues(self) -> np.ndarray:
        return self._eigen[0].cpu().numpy()

    def posterior(self, prior_precision: float, noise: float) -> Posterior:
        """`(H / σ² + δ I)⁻¹`"""
        values, vectors = self._eigen
        covariance = (vectors / (values / noise**2 + prior_precision)) @ vectors.mT
        covariance = (covariance + covariance.mT) / 2
        return FullPosterior(self.names, covariance.to(self.forward.parameters[self.names[0]].dtype))


Curvature = DiagonalCurvature | KroneckerCurvature | FullCurvature


def require_memory(needed: int, what: str, device: torch.device) -> None:
    """Refuse before the machine starts to swap; says nothing where the size of the memory is not known."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > available:
        raise InputError(
            f"{what} needs about {needed / 1e9:.3g} GB and the machine has {available / 1e9:.3g} GB: use "
            "structure='kronecker' or 'diagonal', or fewer parameters, such as those of the last layer"
        )
