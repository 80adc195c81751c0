"""Kronecker factors of the generalised Gauss-Newton matrix (curvature.py), one pair for each weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from propagauss.posteriors.base import Posterior
from propagauss.posteriors.kronecker import Eigenfactors, KroneckerPosterior
from propagauss.posteriors.laplace.capture import Use
from propagauss.posteriors.laplace.gradients import BUDGET, Batch, Forward
from propagauss.posteriors.laplace.layers import Prior, of_name, separable_log_det
from propagauss.posteriors.laplace.ranks import Ranks


class _Key(NamedTuple):
    """Which parameters a linear map uses, by name, and how it reads its weight."""

    weight: str | None
    bias: str | None
    stored: str
    groups: int


class _Sums:
    """Over the rows of one linear map: `Σ_c Σ g gᵀ`, `Σ a aᵀ` (None for a bias alone), and the number of rows."""

    def __init__(self, key: _Key, parameters: dict[str, Tensor]):
        p = parameters[key.weight or str(key.bias)]
        out = p.numel() if key.weight is None else p.shape[0 if key.stored == "[out, in]" else 1]
        self.b = torch.zeros(out, out, dtype=torch.float64, device=p.device)
        self.a = None if key.weight is None else self.b.new_zeros(p.numel() // out, p.numel() // out)
        self.rows = torch.zeros((), dtype=torch.int64, device=p.device)


class KroneckerCurvature:
    """KFAC: `H ≈ B ⊗ A` for a weight, `B` for a bias, `A = mean(a aᵀ)` and `B = Σ_c Σ g gᵀ` over rows.

    A row is one sample at one position, so a layer applied to sequences, to images or several times gets the "expand"
    form of KFAC, which leaves out products between different positions. In a grouped convolution the groups share `A`
    and `B` has one block per group.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self._sums: dict[_Key, _Sums] = {}
        self._others: set[str] = set()

    def add(self, batch: Batch) -> None:
        self._others |= batch.seen.others
        uses = batch.seen.uses
        found = [self._at(_Key(u.weight, u.bias, u.layer.stored, u.layer.groups)) for u in uses]
        for use, sums in zip(uses, found, strict=True):
            self._add_inputs(use, sums)
        for gradients in batch.pull(uses):
            for sums, g in zip(found, gradients, strict=True):
                sums.b += torch.block_diag(*torch.einsum("ngo,ngp->gop", g, g))

    def _at(self, key: _Key) -> _Sums:
        if key not in self._sums:
            self._sums[key] = _Sums(key, self.forward.parameters)
        return self._sums[key]

    @staticmethod
    def _add_inputs(use: Use, sums: _Sums) -> None:
        if sums.a is None:
            return
        layer = use.layer
        # image patches are many times larger than the image
        width = layer.weight.numel() // layer.out * layer.groups * use.rows * use.probe.element_size()
        for part in layer.input.split(max(1, BUDGET * layer.input.shape[0] // max(width, 1))):
            a = layer.inputs(part).flatten(0, 1)  # [rows * G, in]
            sums.a += a.mT @ a
            sums.rows += a.shape[0]

    def merge(self, ranks: Ranks) -> None:
        """Sum over all ranks; some may have seen other layers than this one, or none."""
        seen = ranks.gather((list(self._sums), self._others))
        self._others = set().union(*(others for _, others in seen))
        for key in dict.fromkeys(key for keys, _ in seen for key in keys):
            sums = self._at(key)
            ranks.add(sums.rows, sums.b, *(() if sums.a is None else (sums.a,)))

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen parameters that are weights or biases of linear maps, and nothing else."""
        layouts = {(key.weight, key.stored, key.groups) for key in self._sums}
        weights = [weight for weight, *_ in layouts]
        seen = {n for key in self._sums for n in (key.weight, key.bias) if weights.count(n) < 2} - self._others
        return tuple(n for n in self.forward.chosen if n in seen)

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """`(B, A)` of a weight, `(B,)` of a bias; `(A, B)` for a weight stored as [in, out]."""
        found = {key: sums for key, sums in self._sums.items() if name in (key.weight, key.bias)}
        bs = [sums.b for sums in found.values()]
        b = bs[0] if len(bs) == 1 else torch.stack(bs).sum(0)
        mine = {key: sums for key, sums in found.items() if key.weight == name}
        if not mine:
            return (b,)
        a = torch.stack([s.a for s in mine.values() if s.a is not None]).sum(0) / sum(s.rows for s in mine.values())
        return (b, a) if next(iter(mine)).stored == "[out, in]" else (a, b)

    @property
    def unlearnt(self) -> list[str]:
        return [name for name in self.names if not all(f.any() for f in self.factors(name))]

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

    def log_det(self, layers: Mapping[str, list[str]]) -> Callable[[Tensor], Tensor]:
        return separable_log_det({name: h for name, (_, h) in self._eigen.items()}, layers)

    def posterior(self, prior_precision: Prior, noise: float) -> Posterior:
        """`(B ⊗ A / σ² + δ I)⁻¹`, exactly"""
        dtype = self.forward.parameters[self.names[0]].dtype
        factors = {}
        for name, (vectors, h) in self._eigen.items():
            right = vectors[1] if len(vectors) > 1 else None
            factors[name] = Eigenfactors(vectors[0], right, 1 / (h / noise**2 + of_name(prior_precision, name)))
        return KroneckerPosterior.from_eigen({n: f.map(lambda t: t.to(dtype)) for n, f in factors.items()})
