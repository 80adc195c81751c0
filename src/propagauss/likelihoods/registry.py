"""The likelihoods that `fit_laplace` knows by name. A new one is a file in this folder, and named here."""

from __future__ import annotations

from typing import Literal

from propagauss.likelihoods.base import Likelihood
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.likelihoods.exponential import ExponentialLikelihood
from propagauss.likelihoods.gaussian import GaussianLikelihood
from propagauss.likelihoods.poisson import PoissonLikelihood

LikelihoodName = Literal["classification", "regression", "poisson", "exponential"]
LIKELIHOODS: dict[str, type[Likelihood]] = {
    c.name: c for c in (CategoricalLikelihood, GaussianLikelihood, PoissonLikelihood, ExponentialLikelihood)
}
