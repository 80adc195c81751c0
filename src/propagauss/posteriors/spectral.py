"""A joint covariance known by its eigenvectors: what a full Laplace fit gives.

    Σ = V diag(s) Vᵀ + r (I - V Vᵀ)

`V [P, k]` has orthonormal columns, with variances `s [k]` along them and one variance `r` across all of them. With more
parameters than data times outputs, `k` is the latter, and nothing of size `[P, P]` is ever stored or decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from propagauss.checks import moved
from propagauss.errors import PosteriorError
from propagauss.posteriors.base import check_draws, flat, jacobian_of
from propagauss.posteriors.full import FullPosterior
from propagauss.posteriors.memory import require_memory

BLOCK = 1024  # rows of a covariance made at a time


class SpectralPosterior(FullPosterior):
    """Joint Gaussian over the named parameters, each flattened row by row, in the order given.

    Args:
        names: parameters in the order of the rows of `vectors`.
        vectors: `V [P, k]`, orthonormal columns.
        variances: `s [k]`, the variance along each of them.
        rest: `r`, the variance in every direction orthogonal to them.
        shapes: shape of each parameter; taken from the model by `streamline` if not given.
    """

    kind = "spectral"

    def __init__(
        self,
        names: Sequence[str],
        vectors: Tensor,
        variances: Tensor,
        rest: float,
        shapes: Mapping[str, torch.Size] | None = None,
    ):
        if vectors.dim() != 2 or variances.shape != vectors.shape[1:]:
            raise PosteriorError(
                f"vectors have shape {tuple(vectors.shape)} and variances {tuple(variances.shape)}; they must be "
                "[P, k] and [k]"
            )
        if len(set(names)) != len(names):
            raise PosteriorError("a parameter is named twice")
        if not (variances.isfinite().all() and (variances >= 0).all() and math.isfinite(rest) and rest >= 0):
            raise PosteriorError("a variance is negative or not finite")
        identity = torch.eye(len(variances), dtype=vectors.dtype, device=vectors.device)
        if not torch.allclose(vectors.mT @ vectors, identity, rtol=0, atol=1e3 * torch.finfo(vectors.dtype).eps):
            raise PosteriorError("the columns of vectors are not orthonormal")
        self._variances, self._rest = variances.detach(), rest
        self._fill(tuple(names), vectors.detach(), shapes)

    def block(self, rows: str, columns: str) -> Tensor:
        left, right = self._matrix[self._span(rows)], self._matrix[self._span(columns)]
        return self._dense(left) if rows == columns else self._between(left, right).to(self.dtype)

    def variance(self, name: str) -> Tensor:
        squares = self._matrix[self._span(name)].double().square()
        found = squares @ self._variances.double() + self._rest * (1 - squares.sum(1)).clamp(min=0)
        return found.to(self.dtype).reshape(self.shape(name))

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """`V √s Vᵀ z + √r (z - V Vᵀ z)`, `z` white; of the parameters that were dropped, too."""
        count = check_draws(count, generator)
        v, root = self._matrix, math.sqrt(self._rest)
        white = torch.randn((count, len(v)), generator=generator, dtype=self.dtype, device=v.device)
        draws = root * white + (white @ v * (self._variances.sqrt() - root)) @ v.mT
        return {n: draws[:, self._span(n)].reshape(count, *self.shape(n)) for n in self.names}

    def quadratic(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        """A sum of squares, so that small variances are not differences of large ones."""
        jacobian = jacobian_of(self, jacobian)
        v, some = self._matrix, jacobian[self.names[0]]
        dropped = {
            n: some.new_zeros(*some.shape[:2], self.shape(n).numel()) for n in self._order if n not in self.names
        }
        j = torch.cat([flat((dropped if n in dropped else jacobian)[n], 2) for n in self._order], dim=-1)
        along = j @ v
        total = (along * self._variances) @ along.mT
        if v.shape[1] == v.shape[0]:
            return total
        across = j - along @ v.mT
        return total + self._rest * across @ across.mT

    def to_dense(self) -> Tensor:
        return self._dense(self._matrix if self._kept == self._order else self._matrix[self._index()])

    def _dense(self, v: Tensor) -> Tensor:
        """The covariance of the entries with these rows of `V`, made in blocks of one triangle."""
        size = len(v)
        require_memory(2 * size**2 * v.element_size(), f"the dense covariance of {size} entries", v.device)
        result = v.new_empty(size, size)
        for start in range(0, size, BLOCK):
            rows = slice(start, min(start + BLOCK, size))
            block = self._between(v[rows], v[: rows.stop])
            block.diagonal(start).add_(self._rest)
            result[rows, : rows.stop] = block
            result[: rows.stop, rows] = block.mT
        return result

    def _between(self, left: Tensor, right: Tensor) -> Tensor:
        """`V diag(s - r) Vᵀ` for some rows of `V` on either side, in double precision."""
        return (left.double() * (self._variances.double() - self._rest)) @ right.double().mT

    def _scaled(self, factor: float) -> Self:
        return self._with(_variances=self._variances * factor, _rest=self._rest * factor)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._with(
            _matrix=moved(self._matrix, *args, **kwargs), _variances=moved(self._variances, *args, **kwargs)
        )

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        meta = {"order": self._order, "kept": self._kept, "rest": self._rest}
        return {"vectors": self._matrix, "variances": self._variances}, meta

    @classmethod
    def _from_state(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> SpectralPosterior:
        new = cls(meta["order"], tensors["vectors"], tensors["variances"], meta["rest"])
        return new._with(_kept=tuple(meta["kept"]))
