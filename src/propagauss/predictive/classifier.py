"""`Classifier`: a net of logits and a link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.distributions import Categorical

from propagauss.checks import positive
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.categorical import IGNORED, CategoricalLikelihood
from propagauss.predictive.predictor import Predictor


class Classifier(Predictor):
    """`p(y | x) = E[softmax(f)_y]`, `f ~ N(mean, scale · covariance)`, the expectation approximated by a link.

    Args:
        net: maps inputs to a Gaussian over logits: `[B, C]`, `[B, T, C]`, or with the classes in `class_dim`.
        link: "probit" (the paper), "mean_field", "monte_carlo" or "bridge"; `propagauss.links` says when each is bad.
        scale: multiplies the latent covariance; see `calibrate` and `fit_scale`.
        samples, seed: the draws of the "monte_carlo" link.
        temperature: divides the log-probabilities that the link gave, which are then normalised again; see `calibrate`.
        class_dim: which dimension of the logits holds the classes, such as 1 for `[B, C, H, W]`. None is the last one,
            for logits of up to three dimensions; with more, there must be a number.
        ignore_index: labels of this value are skipped when the scale is fitted.

    Calling it returns a `Categorical`; `log_probs` is the same as a tensor. Both have the classes last. Inputs go to
    the net as they are: a tensor, or a tuple or dict of them.

    Of a net that was linearised with `outputs=`, the chosen classes share the probability that the plain softmax gives
    to them together, dealt out by the link; the others keep theirs.
    """

    _likelihood: CategoricalLikelihood
    class_temperature: Tensor

    def __init__(
        self,
        net: Any,
        link: Literal["probit", "mean_field", "monte_carlo", "bridge"] = "probit",
        scale: float = 1.0,
        samples: int = 512,
        seed: int = 0,
        temperature: float = 1.0,
        *,
        class_dim: int | None = None,
        ignore_index: int = IGNORED,
    ):
        likelihood = CategoricalLikelihood(link, samples, seed, class_dim=class_dim, ignore_index=ignore_index)
        super().__init__(net, likelihood, scale)
        self.register_buffer("class_temperature", torch.ones((), dtype=torch.float64))
        self.temperature = temperature

    @property
    def likelihood(self) -> CategoricalLikelihood:
        # the temperature is a buffer, so that it is saved and loaded with the module
        return replace(self._likelihood, temperature=self.class_temperature)

    @property
    def temperature(self) -> float:
        """The number that divides the log-probabilities after the link."""
        return float(self.class_temperature)

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.class_temperature.fill_(positive(value, "temperature"))

    @property
    def link(self) -> str:
        return self._likelihood.link

    def log_probs(self, *x: Any, **named: Any) -> Tensor:
        """Log-probabilities of the classes, finite and normalised: `[batch, ..., classes]`."""
        return self.log_probs_of(self.latent(*x, **named))

    def log_probs_of(self, latent: Gaussian) -> Tensor:
        """As `log_probs`, from the latent Gaussian."""
        return self.likelihood.log_probs(latent)

    def forward(self, *x: Any, **named: Any) -> Categorical:
        return self.likelihood.predictive(self.latent(*x, **named))

    def fit_scale(self, loader: Iterable[Any], progress: bool = True) -> Self:
        """Set `scale` to the minimiser of the mean NLPD over the `(x, y)` batches of `loader` (held-out data).

        `fit_report` says what it did. Changes neither the arg max of "mean_field" for two classes nor, by much, that of
        the others; it cannot correct wrong means.
        """
        return super().fit_scale(loader, progress)

    def _adopt(self, likelihood: CategoricalLikelihood) -> None:
        self.temperature = float(likelihood.temperature)

    def extra_repr(self) -> str:
        temperature = "" if self.temperature == 1 else f"temperature={self.temperature:.4g}, "
        return f"link={self.link!r}, {temperature}{super().extra_repr()}"
