"""Likelihoods `p(y | f)`, one in each file: all that the fit, a predictor, calibration and export ask of them.

To add one (poisson.py is the example):

1. Write a file with a frozen dataclass that derives from `Likelihood`: its `name`, and the methods that base.py leaves
   open (`loss` and `root` for the fit, `predictive`, `log_predictive` and `decompose` for predictors and calibration,
   `exported`).
   The other methods have defaults for one output per target; override those that do not suit, such as `matched` and
   `targets`, which check what users give.
2. Name it in registry.py: `fit_laplace(..., likelihood=name)` then takes it. `Predictor(net, YourLikelihood())`, in
   predictive/predictor.py, predicts, calibrates and exports, and `propagauss predict` streams what was exported.
3. Add a line to tests/likelihoods/cases.py: `p(y | f)` as torch has it. The contract compares with it the loss, the
   curvature, the fit, the evidence, the predictive, the scale and the export.
"""

from propagauss.likelihoods.base import Decomposition, Likelihood, Moments
from propagauss.likelihoods.bernoulli import BernoulliLikelihood
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.likelihoods.exponential import ExponentialLikelihood
from propagauss.likelihoods.gaussian import GaussianLikelihood
from propagauss.likelihoods.heteroscedastic import HeteroscedasticLikelihood
from propagauss.likelihoods.poisson import PoissonLikelihood
from propagauss.likelihoods.registry import LIKELIHOODS

__all__ = [
    "LIKELIHOODS",
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "Decomposition",
    "ExponentialLikelihood",
    "GaussianLikelihood",
    "HeteroscedasticLikelihood",
    "Likelihood",
    "Moments",
    "PoissonLikelihood",
]
