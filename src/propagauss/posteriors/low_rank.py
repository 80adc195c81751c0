"""Independent variances and a few directions in which all parameters move together: SWAG, and others like it.

Σ = diag(v) + Σ_k d_k d_kᵀ
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.checks import floating, moved, named
from propagauss.errors import PosteriorError
from propagauss.posteriors.base import ByName, Noise, Posterior, check_draws, flat, jacobian_of
from propagauss.posteriors.diagonal import DiagonalNoise, DiagonalPosterior


class LowRankPosterior(Posterior):
    """Variances, and `K` directions over all parameters.

    Args:
        variances: `{parameter name: v, in the parameter's shape}`.
        directions: for the same names, the parts of the directions: `[K, *shape]`.
    """

    kind = "low_rank"

    def __init__(self, variances: Mapping[str, Tensor], directions: Mapping[str, Tensor]):
        self._own = DiagonalPosterior(variances)
        for name, d in named(directions, "directions", "{'0.weight': [K, *shape]}", PosteriorError).items():
            floating(d, f"the tensor of directions of '{name}'", PosteriorError)
        if set(directions) != set(variances):
            odd = sorted(set(directions) ^ set(variances))
            raise PosteriorError(f"variances and directions must have the same parameters; not both have {odd[0]}")
        counts = {d.shape[0] if d.dim() else None for d in directions.values()}
        if len(counts) > 1:
            raise PosteriorError(
                f"parameters have different numbers of directions: {', '.join(sorted(map(str, counts)))}"
            )
        for name, d in directions.items():
            if d.shape[1:] != variances[name].shape or d.dtype != variances[name].dtype:
                raise PosteriorError(
                    f"the directions of '{name}' are {d.dtype} of shape {tuple(d.shape)}; with variances of shape "
                    f"{tuple(variances[name].shape)} they must be {variances[name].dtype} of shape [K, *that]"
                )
            if not d.isfinite().all():
                raise PosteriorError(f"the directions of '{name}' have values that are not finite")
        self._directions = ByName({n: directions[n].detach() for n in variances})
        self.shapes = self._own.shapes
        self.details: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return self._own.names

    @property
    def dtype(self) -> torch.dtype:
        return self._own.dtype

    @property
    def rank(self) -> int:
        """How many directions there are."""
        return next((len(d) for d in self._directions.values()), 0)

    def own_variance(self, name: str) -> Tensor:
        """`v` of one parameter: its variance without the directions."""
        return self._own.variance(name)

    def directions(self, name: str) -> Tensor:
        """`[K, *shape]`"""
        return self._directions[name]

    def variance(self, name: str) -> Tensor:
        return self._own.variance(name) + self._directions[name].square().sum(0)

    def covariance(self, name: str) -> Tensor:
        return self._own.covariance(name) + self.between(name, name)

    def between(self, first: str, second: str) -> Tensor:
        return flat(self._directions[first], 1).mT @ flat(self._directions[second], 1)

    def noise(self, weight: str | None, bias: str | None, transposed: bool = False) -> Noise:
        w = None if weight is None else self._directions[weight].flatten(2)
        w = w.mT if w is not None and transposed else w
        own = self._own.noise(weight, bias, transposed)
        assert isinstance(own, DiagonalNoise)
        return LowRankNoise(own, w, None if bias is None else self._directions[bias])

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        count = check_draws(count, generator)
        device = next((d.device for d in self._directions.values()), None)
        along = torch.randn((count, self.rank), generator=generator, dtype=self.dtype, device=device)
        draws = self._own.sample(count, generator)
        return {n: d + torch.tensordot(along, self._directions[n], 1) for n, d in draws.items()}

    def quadratic(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        jacobian = jacobian_of(self, jacobian)
        along = sum(flat(jacobian[n], 2) @ flat(d, 1).mT for n, d in self._directions.items())  # [B, C, K]
        assert isinstance(along, Tensor)
        return self._own.quadratic(jacobian) + along @ along.mT

    def to_dense(self) -> Tensor:
        rows = torch.cat([flat(d, 1) for d in self._directions.values()], dim=1)
        return self._own.to_dense() + rows.mT @ rows

    def _scaled(self, factor: float) -> Self:
        root = math.sqrt(factor)
        return self._with(self._own._scaled(factor), {n: d * root for n, d in self._directions.items()})

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._with(
            self._own.to(*args, **kwargs), {n: moved(d, *args, **kwargs) for n, d in self._directions.items()}
        )

    def _keep(self, names: tuple[str, ...]) -> Self:
        return self._with(self._own._keep(names), {n: self._directions[n] for n in names})

    def _with(self, own: DiagonalPosterior, directions: dict[str, Tensor]) -> Self:
        new = type(self)({n: own.variance(n) for n in own.names}, directions)
        new.details, new.fitted_on = dict(self.details), self.fitted_on
        return new

    def _bound(self, shapes: dict[str, torch.Size]) -> Self:
        return self

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        self._own._check_shape(name, shape)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        variances = {f"variance:{n}": self._own.variance(n) for n in self.names}
        return variances | {f"directions:{n}": d for n, d in self._directions.items()}, {"names": self.names}

    @classmethod
    def _from_state(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> LowRankPosterior:
        parts = ({n: tensors[f"{part}:{n}"] for n in meta["names"]} for part in ("variance", "directions"))
        return cls(*parts)


class LowRankNoise(Noise):
    """`noise_kl = δ_kl (...) + Σ_r (D_r m + d_r)_k (D_r m + d_r)_l + (D_r C D_rᵀ)_kl`, the first as in `DiagonalNoise`.

    `D [K, out, in]` are the directions of the weight, `d [K, out]` those of the bias.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, own: DiagonalNoise, weight: Tensor | None, bias: Tensor | None):
        super().__init__()
        self.own = own
        self.register_buffer("weight", None if weight is None else weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if bias is None else bias.clone())

    def weight_variance(self) -> Tensor | None:
        variance = self.own.weight_variance()
        return None if variance is None or self.weight is None else variance + self.weight.square().sum(0)

    def variance(self, m: Tensor) -> Tensor:
        return self.own.variance(m) + self._moved(m).square().sum(-2)

    def covariance(self, left: Tensor, right: Tensor, c: Tensor | None) -> Tensor:
        here = self._moved(left)
        there = here if right is left else self._moved(right)
        total = self.own.covariance(left, right, c) + here.mT @ there
        if c is None or self.weight is None:
            return total
        half = torch.einsum("koi,...ij->...koj", self.weight, c)
        return total + torch.einsum("...koj,kpj->...op", half, self.weight)

    def _moved(self, m: Tensor) -> Tensor:
        """`D_k m + d_k`: `[..., in] -> [..., K, out]`"""
        if self.weight is None:
            assert self.bias is not None
            return self.bias.expand(*m.shape[:-1], *self.bias.shape)
        flat = None if self.bias is None else self.bias.flatten()
        return F.linear(m, self.weight.flatten(0, 1), flat).unflatten(-1, self.weight.shape[:2])
