"""Likelihoods `p(y | f)`, one in each file: all that the fit, a predictor, calibration and export ask of them."""

from propagauss.likelihoods.base import Decomposition, Likelihood, Moments
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.likelihoods.gaussian import GaussianLikelihood
from propagauss.likelihoods.poisson import PoissonLikelihood
from propagauss.likelihoods.registry import LIKELIHOODS

__all__ = [
    "LIKELIHOODS",
    "CategoricalLikelihood",
    "Decomposition",
    "GaussianLikelihood",
    "Likelihood",
    "Moments",
    "PoissonLikelihood",
]
