"""Independent parameters: one variance each (mean-field variational inference, diagonal Laplace, SWAG-diagonal)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.checks import floating, moved, named
from propagauss.errors import PosteriorError
from propagauss.posteriors.base import ByName, Noise, Posterior, check_draws, flat, jacobian_of


class DiagonalPosterior(Posterior):
    """Independent Gaussians: `{parameter name: variance in the parameter's shape}`."""

    kind = "diagonal"

    def __init__(self, variances: Mapping[str, Tensor]):
        for name, v in named(variances, "variances", "{'0.weight': variance}", PosteriorError).items():
            floating(v, f"the variance of '{name}'", PosteriorError)
            if not v.isfinite().all():
                raise PosteriorError(f"the variance of '{name}' has values that are not finite")
            if (v < 0).any():
                raise PosteriorError(f"the variance of '{name}' has negative values, smallest {v.min().item():.3g}")
        if len({v.dtype for v in variances.values()}) > 1:
            raise PosteriorError(f"variances have mixed dtypes: { {n: str(v.dtype) for n, v in variances.items()} }")
        self._variances = ByName({name: v.detach() for name, v in variances.items()})
        self.shapes = {name: v.shape for name, v in self._variances.items()}
        self.details: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._variances)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._variances.values())).dtype if self._variances else torch.get_default_dtype()

    def variance(self, name: str) -> Tensor:
        return self._variances[name]

    def covariance(self, name: str) -> Tensor:
        return torch.diag(self._variances[name].flatten())

    def noise(self, weight: str | None, bias: str | None, transposed: bool = False) -> Noise:
        v = None if weight is None else self._variances[weight].flatten(1)
        return DiagonalNoise(v.t() if v is not None and transposed else v, self._variances[bias] if bias else None)

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        count = check_draws(count, generator)
        return {
            name: v.sqrt() * torch.randn((count, *v.shape), generator=generator, dtype=v.dtype, device=v.device)
            for name, v in self._variances.items()
        }

    def quadratic(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        jacobian = jacobian_of(self, jacobian)
        rows = {n: flat(jacobian[n], 2) for n in self.names}
        return torch.stack([(r * self._variances[n].flatten()) @ r.mT for n, r in rows.items()]).sum(0)

    def to_dense(self) -> Tensor:
        return torch.diag(torch.cat([v.flatten() for v in self._variances.values()]))

    def _scaled(self, factor: float) -> Self:
        return self._with({n: v * factor for n, v in self._variances.items()})

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._with({n: moved(v, *args, **kwargs) for n, v in self._variances.items()})

    def _keep(self, names: tuple[str, ...]) -> Self:
        return self._with({n: self._variances[n] for n in names})

    def _with(self, variances: dict[str, Tensor]) -> Self:
        new = type(self)(variances)
        new.details, new.fitted_on = dict(self.details), self.fitted_on
        return new

    def _bound(self, shapes: dict[str, torch.Size]) -> Self:
        return self

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        if self._variances[name].shape != shape:
            raise PosteriorError(
                f"the variance of '{name}' has shape {tuple(self._variances[name].shape)}, the parameter {tuple(shape)}"
            )

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return dict(self._variances), {"names": self.names}

    @classmethod
    def _from_state(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> DiagonalPosterior:
        return cls({name: tensors[name] for name in meta["names"]})


class DiagonalNoise(Noise):
    """`noise_kl = δ_kl (Σ_i S_ii V_ki + v_k)` for weight variances `V [out, in]` and bias variances `v [out]`."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor | None, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", None if weight is None else weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if bias is None else bias.clone())

    def weight_variance(self) -> Tensor | None:
        return self.weight

    def variance(self, m: Tensor) -> Tensor:
        return self._weigh(m * m)

    def covariance(self, left: Tensor, right: Tensor, c: Tensor | None) -> Tensor:
        moment = left * right
        if c is not None:
            moment = moment + c.diagonal(dim1=-2, dim2=-1)
        return torch.diag_embed(self._weigh(moment))

    def _weigh(self, moment: Tensor) -> Tensor:
        if self.weight is None:
            assert self.bias is not None
            return self.bias.expand(*moment.shape[:-1], -1)
        return F.linear(moment, self.weight, self.bias)
