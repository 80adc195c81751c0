"""The likelihoods that `fit_laplace` knows by name. A new one is a file in this folder, and named here."""

from __future__ import annotations

from typing import Literal

from propagauss.checks import choice
from propagauss.likelihoods.base import Likelihood
from propagauss.likelihoods.bernoulli import BernoulliLikelihood
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.likelihoods.exponential import ExponentialLikelihood
from propagauss.likelihoods.gaussian import GaussianLikelihood
from propagauss.likelihoods.heteroscedastic import HeteroscedasticLikelihood
from propagauss.likelihoods.poisson import PoissonLikelihood

LikelihoodName = Literal["classification", "binary", "regression", "heteroscedastic", "poisson", "exponential"]
_CLASSES: tuple[type[Likelihood], ...] = (
    CategoricalLikelihood,
    BernoulliLikelihood,
    GaussianLikelihood,
    HeteroscedasticLikelihood,
    PoissonLikelihood,
    ExponentialLikelihood,
)
LIKELIHOODS: dict[str, type[Likelihood]] = {each.name: each for each in _CLASSES}


def as_likelihood(given: str | Likelihood) -> Likelihood:
    """A likelihood by its name, or as it is."""
    return given if isinstance(given, Likelihood) else LIKELIHOODS[choice(given, "likelihood", LIKELIHOODS)]()
