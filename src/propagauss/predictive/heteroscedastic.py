"""`HeteroscedasticRegressor`: a net of means and of the noise around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from propagauss.checks import positive
from propagauss.likelihoods.heteroscedastic import HeteroscedasticLikelihood
from propagauss.predictive.predictor import Predictor


class HeteroscedasticRegressor(Predictor):
    """`p(y | x) = N(y; E[μ], Var[μ] + E[e^s])`: the net gives the mean `μ` and the logarithm `s` of the noise variance.

    Args:
        net: maps inputs to a Gaussian `[..., 2]`, the last dimension being `(μ, s)`; or to the two apart, as a tuple
            `(mean, log_variance)` or in fields of these names, as the model returns them: `[B]` or `[B, 1]` each is
            `[B, 2]`, and `[B, k]` is `[B, k, 2]`.
        scale: multiplies the latent covariance; see `fit_scale`.
        noise_factor: multiplies the variance of the noise.

    Calling it returns a `Normal` of shape `[..., 1]`; targets are `[..., 1]` or `[...]`. `decompose` gives the
    epistemic part `Var[μ]` and the aleatoric one, `E[e^s]`, which add up to its variance.
    """

    noise_variance_factor: Tensor

    def __init__(self, net: Any, scale: float = 1.0, noise_factor: float = 1.0):
        super().__init__(net, HeteroscedasticLikelihood(), scale)
        self.register_buffer("noise_variance_factor", torch.ones((), dtype=torch.float64))
        self.noise_factor = noise_factor

    @property
    def likelihood(self) -> HeteroscedasticLikelihood:
        # the factor is a buffer, so that it is saved and loaded with the module
        return HeteroscedasticLikelihood(self.noise_variance_factor)

    @property
    def noise_factor(self) -> float:
        """The number that multiplies the variance of the noise."""
        return float(self.noise_variance_factor)

    @noise_factor.setter
    def noise_factor(self, value: float) -> None:
        self.noise_variance_factor.fill_(positive(value, "noise_factor"))

    def forward(self, *x: Any, **named: Any) -> Normal:
        return self.likelihood.predictive(self.latent(*x, **named))

    def _adopt(self, likelihood: HeteroscedasticLikelihood) -> None:
        self.noise_factor = float(likelihood.noise_factor)

    def extra_repr(self) -> str:
        factor = "" if self.noise_factor == 1 else f"noise_factor={self.noise_factor:.4g}, "
        return f"{factor}{super().extra_repr()}"
