"""Which predictor a likelihood goes with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from propagauss.likelihoods import CategoricalLikelihood, GaussianLikelihood, Likelihood
from propagauss.predictive.loading import of_likelihood
from propagauss.predictive.predictor import Predictor
from propagauss.predictive.regressor import Regressor


def predictor(net: Any, likelihood: Likelihood, link: str = "") -> Predictor:
    """A `Classifier`, a `Regressor` or what else suits, with the options of the likelihood and one of its links."""
    if isinstance(likelihood, GaussianLikelihood) and not likelihood.noise.any():
        return Regressor(net)  # with the noise that the posterior was fitted with
    given: Any = likelihood
    return of_likelihood(net, replace(given, link=link) if link else likelihood)


def with_class_dim(likelihood: Likelihood, output: Any, y: Any) -> Likelihood:
    """The dimension of the classes, if it was not given, is the one that labels do not have, as in the fit."""
    if not isinstance(likelihood, CategoricalLikelihood) or likelihood.class_dim is not None or output.dim() < 3:
        return likelihood
    return replace(likelihood, class_dim=likelihood.dim_of(output, y, "the validation data"))
