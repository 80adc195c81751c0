"""Real numbers whose noise the network gives as well: `p(y | f) = N(y; μ, e^s)`, `f = (μ, s)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Normal

from propagauss.checks import positive
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import check_targets
from propagauss.inputs.pairs import joined
from propagauss.likelihoods.base import (
    Decomposition,
    Free,
    Held,
    Likelihood,
    Moments,
    Root,
    bounds_beside,
    diagonal_root,
)


@dataclass(frozen=True, eq=False)
class HeteroscedasticLikelihood(Likelihood):
    """`p(y | f) = N(y; μ, e^s)`; the network gives `[..., 2]`: the mean `μ` and the logarithm `s` of the variance.

    Or it gives them apart, see `joined`.

    Over the latent, mean and variance are exact, and the predictive is the Normal that has them. The true one has
    heavier tails: it is a mixture of Normals of many widths.

    Args:
        noise_factor: multiplies the variance of the noise in predictions; the fit takes it as 1.
    """

    noise_factor: float | Tensor = 1.0

    name: ClassVar[str] = "heteroscedastic"
    normal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.noise_factor, Tensor):  # whoever gives a tensor has looked at it: it may be traced
            positive(self.noise_factor, "noise_factor")

    def joined(self, output: Any) -> Any:
        """Mean and log variance may come apart: `(mean, log_variance)`, or fields of these names."""
        return joined(output)

    # -- the fit

    def matched(self, output: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        """`[B, 2 n]`, mean and log variance in turn, and `[B, n]`."""
        if output.dim() < 2 or output.shape[-1] != 2:
            raise InputError(f"{where}: {_needs(output.shape)}")
        _, y = super().matched(output[..., :1], y, where)
        return output.reshape(len(y), -1), y

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """`½ Σ (y - μ)² e^-s + s + log 2π`"""
        mean, log_variance = f.unflatten(1, (-1, 2)).unbind(-1)
        return 0.5 * ((y - mean).square() * (-log_variance).exp() + log_variance + math.log(2 * math.pi)).sum()

    def root(self, f: Tensor) -> Root:
        """The Hessian is indefinite for some `y`; its mean over them, the Fisher matrix, is `diag(e^-s, ½)`."""
        log_variance = f.unflatten(1, (-1, 2))[..., 1]
        return diagonal_root(torch.stack([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], -1).flatten(1))

    # -- the prediction

    def predictive(self, latent: Gaussian) -> Normal:
        if latent.mean.dim() < 2 or latent.shape[-1] != 2:
            raise InputError(_needs(latent.shape))
        variance = self.decompose(latent).total
        if not torch.compiler.is_compiling() and not variance.isfinite().all():
            largest = latent.variance[..., 1].max().item()
            raise InputError(
                f"the expected variance of the noise is not finite: its logarithm has a variance of {largest:.3g}; use "
                "a larger prior precision, fewer random parameters, or fit_scale"
            )
        return Normal(latent.mean[..., :1], variance.sqrt())

    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        total = self._parts(moments).total
        return -0.5 * (total.log() + (y - moments.mean[..., :1]).square() / total + math.log(2 * math.pi))

    def decompose(self, latent: Gaussian) -> Decomposition:
        """`Var[y] = Var[μ] + E[e^s]`, each `[..., 1]`; `E[e^s] = exp(s + v_s / 2)`."""
        return self._parts(self.moments(latent))

    def _parts(self, moments: Moments) -> Decomposition:
        (mean, variance), factor = moments[:2], self.noise_factor
        noise = (mean[..., 1:] + variance[..., 1:] / 2).exp()
        return Decomposition(variance[..., :1], noise * (factor.to(noise) if isinstance(factor, Tensor) else factor))

    # -- calibration

    def targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        return check_targets(y, torch.Size((*shape[:-1], 1)))

    def free(self, data: Sequence[Held]) -> Free:
        """The factor of the noise variance."""
        ((moments, y),) = data
        error = (y - moments.mean[..., :1]).square()

        def guess(scale: float) -> Tensor:
            """The factor that, with this scale, explains the errors on average, over what the noise is there."""
            epistemic, noise = replace(self, noise_factor=1.0)._parts(moments.scaled(scale))
            return ((error - epistemic) / noise).mean().clamp(1e-3, 1e3)

        bounds = [(math.log(1e-6), math.log(1e6))]
        beside = bounds_beside(0.25, bounds)  # of a variance: half the standard deviation
        return Free("noise_factor", bounds, guess, lambda factor: replace(self, noise_factor=factor), None, beside)

    # -- the export

    def exported(self, latent: Gaussian) -> dict[str, Tensor]:
        epistemic, aleatoric = self.decompose(latent)
        return {"mean": latent.mean[..., :1], "variance": epistemic + aleatoric, "epistemic_variance": epistemic}

    def details(self) -> dict[str, Any]:
        return {"noise_factor": float(self.noise_factor)}


def _needs(shape: torch.Size) -> str:
    return (
        f"likelihood='heteroscedastic' needs outputs [..., 2], the mean and the logarithm of the variance, not "
        f"{tuple(shape)}: let the model return torch.stack([mean, log_variance], -1), or both as a tuple"
    )
