"""propagauss: the predictive distribution of a Bayesian neural network, analytically, in one forward pass."""

from propagauss import baselines, links, metrics, tasks
from propagauss.errors import InputError, PosteriorError, PropagaussError, UnsupportedOpError
from propagauss.gaussian import Gaussian
from propagauss.likelihood import Classifier, Regressor
from propagauss.network import Streamlined
from propagauss.plan import Plan
from propagauss.posterior import (
    DiagonalPosterior,
    FullPosterior,
    KroneckerPosterior,
    LowRankPosterior,
    Posterior,
    fit_laplace,
    from_ivon,
    from_laplace,
    from_swag,
    load_posterior,
)
from propagauss.rules import rule
from propagauss.streamline import streamline

__version__ = "0.1.0"

__all__ = [
    "Classifier",
    "DiagonalPosterior",
    "FullPosterior",
    "Gaussian",
    "InputError",
    "KroneckerPosterior",
    "LowRankPosterior",
    "Plan",
    "Posterior",
    "PosteriorError",
    "PropagaussError",
    "Regressor",
    "Streamlined",
    "UnsupportedOpError",
    "baselines",
    "fit_laplace",
    "from_ivon",
    "from_laplace",
    "from_swag",
    "links",
    "load_posterior",
    "metrics",
    "rule",
    "streamline",
    "tasks",
]
