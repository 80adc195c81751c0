"""The generalised Gauss-Newton matrix of a model, as a diagonal, as Kronecker factors, or dense.

    H = Σ_n J_nᵀ Λ_n J_n = Σ_n Σ_c r_nc r_ncᵀ,    r_nc = J_nᵀ s_nc

with `Λ_n = Σ_c s_nc s_ncᵀ` the Hessian of the loss of sample `n` in its outputs (the rest is in gradients.py). Each
class (one is in kfac.py) holds one structure: `add` takes a batch, `merge` sums over processes that share the data,
`unlearnt` names parameters with `H = 0`, `eigenvalues` serves the choice of the prior (`log_det` that of one for each
layer), `posterior` adds the prior and inverts. Sums are kept in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from propagauss.posteriors.base import Posterior, flat
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.full import FullPosterior
from propagauss.posteriors.laplace.capture import Use
from propagauss.posteriors.laplace.gradients import Batch, Forward, as_stored, per_sample_gradients
from propagauss.posteriors.laplace.kfac import KroneckerCurvature
from propagauss.posteriors.laplace.layers import Prior, of_name, separable_log_det
from propagauss.posteriors.laplace.ranks import Ranks
from propagauss.posteriors.laplace.spots import Spot
from propagauss.posteriors.memory import require_memory
from propagauss.posteriors.spectral import SpectralPosterior


class DiagonalCurvature:
    """`diag(H)`, exact."""

    def __init__(self, forward: Forward):
        self.forward, self.names = forward, forward.chosen
        self._sums = {n: torch.zeros_like(forward.parameters[n], dtype=torch.float64) for n in self.names}
        self._padding: set[tuple[str, int]] = set()

    def add(self, batch: Batch) -> None:
        self._padding |= batch.seen.padding
        single = {n: u[0] for n, u in batch.direct.items() if len(u) == 1}
        spots = [u for u in single.values() if isinstance(u, Spot)]
        quick = {n: u for n, u in single.items() if isinstance(u, Use) and u.rows == batch.size}
        self._add_quickly(batch, quick, spots)
        rest = [n for n in self.names if n not in quick and n not in {s.name for s in spots}]
        for gradients in per_sample_gradients(batch, rest) if rest else ():
            for name, g in gradients.items():
                self._sums[name] += g.square().sum(0)

    def _add_quickly(self, batch: Batch, quick: dict[str, Use], spots: list[Spot]) -> None:
        """A layer applied once per sample has `r = g aᵀ`, so `Σ_c r²` is `(Σ_c g²) (a²)ᵀ`: one product for all."""
        uses = [u for u in batch.seen.uses if any(u is q for q in quick.values())]
        squares: list[Tensor] = []
        for gradients in batch.pull([*uses, *spots]):
            for spot, g in zip(spots, gradients[len(uses) :], strict=True):
                self._sums[spot.name] += spot.sum_of_squares(g)
            new = [g.square() for g in gradients[: len(uses)]]
            squares = [s.add_(n) for s, n in zip(squares, new, strict=True)] if squares else new
        for use, s in zip(uses, squares, strict=bool(squares)):
            if use.weight is not None and quick.get(use.weight) is use:
                a = use.layer.inputs(use.layer.input).square()
                total = self._sums[use.weight]
                total += as_stored(torch.einsum("ngo,ngi->goi", s, a), use.layer).reshape(total.shape)
            if use.bias is not None and quick.get(use.bias) is use:
                self._sums[use.bias] += s.sum(0).reshape(self._sums[use.bias].shape)

    def merge(self, ranks: Ranks) -> None:
        """Sum over all ranks."""
        self._padding = set().union(*ranks.gather(self._padding))
        ranks.add(*self._sums.values())

    @property
    def unlearnt(self) -> list[str]:
        return [n for n, s in self._sums.items() if not s.any()]

    def eigenvalues(self) -> np.ndarray:
        return torch.cat([s.flatten() for s in self._sums.values()]).cpu().numpy()

    def log_det(self, layers: Mapping[str, list[str]]) -> Callable[[Tensor], Tensor]:
        return separable_log_det(self._sums, layers)

    def posterior(self, prior_precision: Prior, noise: float) -> Posterior:
        """`1 / (diag(H) / σ² + δ)`, and 0 for rows of padding that nothing was learnt about."""
        dtype = self.forward.parameters[self.names[0]].dtype
        variances = {n: 1 / (s / noise**2 + of_name(prior_precision, n)) for n, s in self._sums.items()}
        for name, row in self._padding:
            variances[name][row] *= self._sums[name][row] > 0
        return DiagonalPosterior({n: v.to(dtype) for n, v in variances.items()})


class FullCurvature:
    """`H` over all chosen parameters, each flattened row by row, exact.

    Kept as its rows `r_nc` while these are fewer than half the parameters: their singular vectors then take less time
    and memory than the eigenvectors of the dense `H`, and give the same.
    """

    def __init__(self, forward: Forward):
        self.forward, self.names = forward, forward.chosen
        self._first = forward.parameters[self.names[0]]
        self._size = sum(forward.size(n) for n in self.names)
        self._rows: list[Tensor] = []  # each [some, P]
        self._count = 0  # rows seen
        self._matrix: Tensor | None = None  # once the rows are too many
        self._padding: set[tuple[str, int]] = set()

    def add(self, batch: Batch) -> None:
        self._padding |= batch.seen.padding
        for gradients in per_sample_gradients(batch, list(self.names)):
            self._rows.append(torch.cat([flat(gradients[n], 1) for n in self.names], dim=1))
            self._count += len(self._rows[-1])
            self._settle(self._count)

    def _settle(self, total: int) -> None:
        """Make sure that `total` rows fit: as they are, or summed up in the dense matrix."""
        what = f"a full covariance over {self._size} parameters"
        if 2 * total <= self._size:
            # rows, the same in double precision, their singular vectors and a copy that the decomposition works on
            needed = (self._first.element_size() + 3 * 8) * total * self._size
            return require_memory(needed, what, self._first.device)
        if self._matrix is None:
            # H, its eigenvectors, their copy in the posterior and the workspace of the eigendecomposition
            require_memory(4 * 8 * self._size**2, what, self._first.device)
            self._matrix = self._first.new_zeros(self._size, self._size, dtype=torch.float64)
        for rows in self._rows:
            self._matrix += rows.mT @ rows
        self._rows = []

    def merge(self, ranks: Ranks) -> None:
        """Sum over all ranks: of the matrices, or of rows with zeros in place of those of other ranks."""
        counts, padding = zip(*ranks.gather((self._count, self._padding)), strict=True)
        self._padding = set().union(*padding)
        self._settle(sum(counts))
        if self._matrix is None and len(counts) > 1:
            everyone = self._first.new_zeros(sum(counts), self._size)
            start = sum(counts[: ranks.rank])
            everyone[start : start + self._count] = torch.cat([everyone[:0], *self._rows])
            self._rows = [everyone]
        ranks.add(*(self._rows if self._matrix is None else [self._matrix]))

    @cached_property
    def _learnt(self) -> Tensor:
        """Which parameters the data say something about, `[P]`."""
        if self._matrix is not None:
            return self._matrix.diagonal() != 0
        found = torch.zeros(self._size, dtype=torch.bool, device=self._first.device)
        return torch.stack([found, *(rows.any(0) for rows in self._rows)]).any(0)

    @property
    def unlearnt(self) -> list[str]:
        return [n for n, learnt in self._by_name(self._learnt).items() if not learnt.any()]

    def _by_name(self, vector: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, vector.split([self.forward.size(n) for n in self.names]), strict=True))

    @cached_property
    def _fixed(self) -> Tensor:
        """Which parameters are not random, `[P]`: rows of padding that nothing was learnt about."""
        found = torch.zeros(self._size, dtype=torch.bool, device=self._first.device)
        by_name = self._by_name(found)
        for name, row in self._padding:
            by_name[name].view(self.forward.parameters[name].shape)[row] = True
        return found & ~self._learnt

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues `[k]` and eigenvectors `[P, k]` of random parameters; all that are left have the eigenvalue 0."""
        random = ~self._fixed if self._fixed.any() else slice(None)  # which copies nothing
        if self._matrix is not None:
            values, vectors = torch.linalg.eigh(self._matrix[random][:, random])
        else:
            rows = torch.cat(self._rows)[:, random].double()
            _, roots, vectors = torch.linalg.svd(rows, full_matrices=False)
            values, vectors = roots.square(), vectors.mT
        if isinstance(random, Tensor):
            found = vectors.new_zeros(self._size, len(values))
            found[random] = vectors
            vectors = found
        return values.clamp(min=0), vectors

    def eigenvalues(self) -> np.ndarray:
        return self._eigen[0].cpu().numpy()

    def log_det(self, layers: Mapping[str, list[str]]) -> Callable[[Tensor], Tensor]:
        """Of `I + D^-½ H D^-½`, or of `I + R D⁻¹ Rᵀ` while `H = Rᵀ R` is kept as its rows."""
        number = {name: i for i, names in enumerate(layers.values()) for name in names}
        sizes = torch.tensor([self.forward.size(n) for n in self.names])
        index = torch.tensor([number[n] for n in self.names]).repeat_interleave(sizes).to(self._first.device)
        rows = None if self._matrix is not None else torch.cat(self._rows).double()

        def log_det(ratios: Tensor) -> Tensor:
            scale = ratios.to(index.device)[index].rsqrt()  # [P]
            if rows is None:
                assert self._matrix is not None
                inner = scale.unsqueeze(1) * self._matrix * scale
            else:
                scaled = rows * scale
                inner = scaled @ scaled.mT
            identity = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
            return 2 * torch.linalg.cholesky(identity + inner).diagonal().log().sum().cpu()

        return log_det

    def posterior(self, prior_precision: Prior, noise: float) -> Posterior:
        """`(H / σ² + δ I)⁻¹`, and nothing for parameters that are not random."""
        if not isinstance(prior_precision, float | int):
            return self._with_layers(prior_precision, noise)
        values, vectors = self._eigen
        variances = 1 / (values / noise**2 + prior_precision)
        dtype = self._first.dtype
        if self._fixed.any():
            own = torch.eye(self._size, dtype=vectors.dtype, device=vectors.device)[:, self._fixed]
            vectors, variances = torch.cat([vectors, own], 1), torch.cat([variances, variances.new_zeros(own.shape[1])])
        return SpectralPosterior(self.names, vectors.to(dtype), variances.to(dtype), 1 / prior_precision)

    def _with_layers(self, prior_precision: Mapping[str, float], noise: float) -> Posterior:
        """`D^-½ (D^-½ H D^-½ / σ² + I)⁻¹ D^-½`, dense."""
        require_memory(4 * 8 * self._size**2, f"a full covariance over {self._size} parameters", self._first.device)
        ones = [torch.full((self.forward.size(n),), prior_precision[n], dtype=torch.float64) for n in self.names]
        scale = torch.cat(ones).to(self._first.device).rsqrt()
        matrix = self._matrix
        if matrix is None:
            rows = torch.cat(self._rows).double()
            matrix = rows.mT @ rows
        inner = scale.unsqueeze(1) * matrix * scale / noise**2
        root = torch.linalg.cholesky(inner + torch.eye(self._size, dtype=inner.dtype, device=inner.device))
        scale = scale * ~self._fixed
        covariance = scale.unsqueeze(1) * torch.cholesky_inverse(root) * scale
        return FullPosterior(self.names, ((covariance + covariance.mT) / 2).to(self._first.dtype))


Curvature = DiagonalCurvature | KroneckerCurvature | FullCurvature
