"""`Regressor`: a net of real numbers and the noise of the observations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from propagauss.checks import flag
from propagauss.likelihoods.gaussian import GaussianLikelihood, standard_deviation
from propagauss.network.streamlined import Streamlined
from propagauss.posteriors.base import Posterior
from propagauss.predictive.calibration import fit_scale
from propagauss.predictive.predictor import Predictor


class Regressor(Predictor):
    """`p(y | x) = N(y; mean, scale · variance + noise²)`.

    Args:
        net: maps inputs to a Gaussian, `[batch, ..., outputs]`.
        noise: standard deviation of the observations, one number or one per output. None is the one that the posterior
            of the net was fitted with; if there is none, predictions are refused until
            `fit_scale(loader, fit_noise=True)` finds it (one per output).
        scale: multiplies the latent variance; see `fit_scale`.

    Outputs that `linearise(outputs=...)` did not choose have the noise alone as their variance.
    """

    noise_stddev: Tensor

    def __init__(self, net: Any, noise: float | Tensor | None = None, scale: float = 1.0):
        super().__init__(net, GaussianLikelihood(), scale)
        if noise is None:
            noise = _fitted_noise(net)
        unknown = torch.full((), math.nan, dtype=torch.float64)
        self.register_buffer("noise_stddev", unknown if noise is None else standard_deviation(noise))

    @property
    def likelihood(self) -> GaussianLikelihood:
        # the noise is a buffer, so that it is saved and loaded with the module
        return GaussianLikelihood(self.noise_stddev)

    @property
    def noise(self) -> float | Tensor:
        """Standard deviation of the observations: a number, or `[outputs]`; NaN if it is not known."""
        return self.noise_stddev.clone() if self.noise_stddev.dim() else float(self.noise_stddev)

    def forward(self, *x: Any, **named: Any) -> Normal:
        return self.likelihood.predictive(self.latent(*x, **named))

    def joint(self, *x: Any, **named: Any) -> MultivariateNormal:
        """All outputs of a sample together, flattened, with the covariance that the latent has between them."""
        latent = self.latent(*x, **named)
        noise = self.likelihood.decompose(latent).aleatoric.flatten(1)
        return MultivariateNormal(latent.mean.flatten(1), latent.covariance + torch.diag_embed(noise))

    def fit_scale(self, loader: Iterable[Any], fit_noise: bool = False, progress: bool = True) -> Self:
        """Set `scale`, and `noise` if asked, to the minimiser of the mean NLPD over the `(x, y)` batches of `loader`.

        With `fit_noise`, `noise` keeps its form: one number, or one per output (as it also is if none was known).
        `fit_report` says what was done.
        """
        fit_noise = flag(fit_noise, "fit_noise")
        self.fit_report, fitted = fit_scale(self.net, loader, self.likelihood, self.scale, fit_noise, progress)
        self.scale = self.fit_report.after
        if fit_noise:
            self._adopt(fitted)
        return self

    def _adopt(self, likelihood: GaussianLikelihood) -> None:
        self.noise_stddev = likelihood.noise.to(self.noise_stddev)

    def extra_repr(self) -> str:
        noise = ", ".join("unknown" if math.isnan(n) else f"{n:.4g}" for n in self.noise_stddev.flatten().tolist())
        return f"noise={f'[{noise}]' if self.noise_stddev.dim() else noise}, {super().extra_repr()}"


def _fitted_noise(net: Any) -> float | None:
    """The noise that the posterior of a net, or of a baseline, was fitted with."""
    if isinstance(net, Streamlined):
        return net.noise
    posterior = getattr(net, "posterior", None)
    return posterior.details.get("noise") if isinstance(posterior, Posterior) else None
