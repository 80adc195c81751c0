"""`BinaryClassifier`: a net of single logits, each the answer to a question of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Bernoulli

from propagauss.checks import positive
from propagauss.likelihoods.bernoulli import BernoulliLikelihood
from propagauss.predictive.predictor import Predictor


class BinaryClassifier(Predictor):
    """`p(y = 1 | x) = E[σ(f)]`, `f ~ N(mean, scale · variance)`, for every logit on its own.

    Args:
        net: maps inputs to a Gaussian over logits of any shape: `[B]` or `[B, 1]` for one, `[B, labels]` for many.
        link: "probit", within 0.02 of the integral, or "quadrature", the integral to ten digits.
        scale: multiplies the latent variance; see `fit_scale`.
        temperature: divides the logit of the probability that the link gave.

    Calling it returns a `Bernoulli` in the shape of the logits. Labels are 0 and 1, as integers, booleans or floats,
    `[B]` or `[B, 1]` for one logit, else in the shape of the logits.
    """

    _likelihood: BernoulliLikelihood
    label_temperature: Tensor

    def __init__(
        self,
        net: Any,
        link: Literal["probit", "quadrature"] = "probit",
        scale: float = 1.0,
        temperature: float = 1.0,
    ):
        super().__init__(net, BernoulliLikelihood(link), scale)
        self.register_buffer("label_temperature", torch.ones((), dtype=torch.float64))
        self.temperature = temperature

    @property
    def likelihood(self) -> BernoulliLikelihood:
        # the temperature is a buffer, so that it is saved and loaded with the module
        return replace(self._likelihood, temperature=self.label_temperature)

    @property
    def link(self) -> str:
        return self._likelihood.link

    @property
    def temperature(self) -> float:
        """The number that divides logits after the link."""
        return float(self.label_temperature)

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.label_temperature.fill_(positive(value, "temperature"))

    def forward(self, *x: Any, **named: Any) -> Bernoulli:
        return self.likelihood.predictive(self.latent(*x, **named))

    def _adopt(self, likelihood: BernoulliLikelihood) -> None:
        self.temperature = float(likelihood.temperature)

    def extra_repr(self) -> str:
        temperature = "" if self.temperature == 1 else f"temperature={self.temperature:.4g}, "
        return f"link={self.link!r}, {temperature}{super().extra_repr()}"
