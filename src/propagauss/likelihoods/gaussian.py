"""Real numbers with Gaussian noise of one standard deviation per output: `p(y | f) = N(y; f, σ²)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal

from propagauss.checks import kind, tensor
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.base import Decomposition, Free, Held, Likelihood, Moments, Root, diagonal_root


@dataclass(frozen=True, eq=False)
class GaussianLikelihood(Likelihood):
    """`p(y | f) = N(y; f, σ²)`; over the latent it is `N(y; m, v + σ²)`, exactly.

    Args:
        noise: `σ`, one number or one per output (the last dimension); see `standard_deviation`. NaN is one that is not
            known, with which nothing can be predicted. The fit starts at 1 and has its own.
    """

    noise: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    name: ClassVar[str] = "regression"
    noisy: ClassVar[bool] = True
    normal: ClassVar[bool] = True

    # -- the fit

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """`½ Σ (f - y)²`"""
        return 0.5 * (f - y).square().sum()

    def root(self, f: Tensor) -> Root:
        """The Hessian is the identity."""
        return diagonal_root(torch.ones_like(f))

    # -- the prediction

    def predictive(self, latent: Gaussian) -> Normal:
        epistemic, aleatoric = self.decompose(latent)
        variance = epistemic + aleatoric
        if not torch.compiler.is_compiling():
            check_positive(variance)
        return Normal(latent.mean, variance.sqrt())

    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        total = self._total(moments)
        return -0.5 * (total.log() + (y - moments.mean).square() / total + math.log(2 * math.pi))

    def decompose(self, latent: Gaussian) -> Decomposition:
        noise = self.noise.to(latent.device, latent.dtype)
        if not torch.compiler.is_compiling():
            self._check_known()
        check_noise(noise, latent.shape)
        return Decomposition(latent.variance, noise.square().expand(latent.shape))

    def _total(self, moments: Moments) -> Tensor:
        return moments.covariance + self.noise.to(moments.mean.device, moments.mean.dtype).square()

    # -- calibration

    def _check_known(self) -> None:
        if self.noise.isnan().any():
            raise InputError(
                "the noise of the observations is not known, as the posterior of this net was not fitted with "
                "likelihood='regression': give Regressor(net, noise=...), or call fit_scale(loader, fit_noise=True)"
            )

    def check(self, moments: Moments) -> None:
        self._check_known()
        if self.noise.any():
            check_noise(self.noise, moments.mean.shape)
        check_positive(self._total(moments))

    def free(self, data: Sequence[Held]) -> Free:
        """The noise, in the form it has; one per output if it is zero or not known.

        It is told apart from the scale only by how the latent variance differs between points: where it hardly does,
        the sum is well determined and the two numbers are not.
        """
        ((moments, y),) = data
        error, variance = (y - moments.mean).square(), moments.covariance
        if self.noise.nan_to_num().any():
            check_noise(self.noise, error.shape)
            form = self.noise.shape
        else:
            outputs = error.shape[1:][-1:]
            form = outputs if outputs.numel() > 1 else torch.Size(())
        over = tuple(range(error.dim() - len(form)))
        mean_error, mean_variance = error.mean(over).clamp(min=1e-24), variance.mean(over)
        # noise far below the errors would let a point that is hit exactly send the density to infinity
        bounds = [(t - math.log(1e4), t + math.log(10)) for t in mean_error.sqrt().log().flatten().tolist()]

        def guess(scale: float) -> Tensor:
            """The noise that, with this scale, explains the errors on average."""
            return (mean_error - scale * mean_variance).clamp(min=0).maximum(1e-4 * mean_error).sqrt()

        return Free("noise", bounds, guess, lambda noise: replace(self, noise=noise.reshape(form)))

    # -- the export

    def exported(self, latent: Gaussian) -> dict[str, Tensor]:
        epistemic, aleatoric = self.decompose(latent)
        return {"mean": latent.mean, "variance": epistemic + aleatoric, "epistemic_variance": epistemic}

    def details(self) -> dict[str, Any]:
        self._check_known()
        return {"noise": self.noise.tolist()}


def standard_deviation(noise: Any) -> Tensor:
    """A noise as users give it, as a tensor of its own."""
    need = "it must be a standard deviation, or one per output, none negative"
    if isinstance(noise, Tensor) and tensor(noise, "noise").is_floating_point():
        noise = noise.detach().to("cpu", torch.float64)  # NumPy knows no bfloat16
    try:
        given = np.asarray(noise)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"noise is {kind(noise)}; {need}") from error
    if given.dtype.kind not in "iuf" or given.ndim > 1 or not given.size:
        raise InputError(f"noise is {kind(noise)}; {need}")
    stddev = torch.tensor(given, dtype=torch.float64)
    if not (stddev.isfinite() & (stddev >= 0)).all():
        raise InputError(f"noise is {stddev.tolist()}; {need}")
    return stddev


def check_noise(noise: Tensor, shape: torch.Size) -> None:
    """Refuse noise levels that do not belong to the last dimension of outputs of `shape`."""
    if noise.dim() and noise.shape != shape[1:][-1:]:
        raise InputError(
            f"there are {noise.numel()} noise levels for outputs of shape {tuple(shape)}: give one per output"
        )


def check_positive(variance: Tensor) -> None:
    """Refuse a predictive without any variance: its density is infinite or zero everywhere."""
    if not (variance > 0).all():
        raise InputError(
            "the predictive variance is zero at some points, where neither the latent has any nor is there noise: "
            "give Regressor(net, noise=...) or call fit_scale(loader, fit_noise=True)"
        )
