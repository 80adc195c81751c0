"""propagauss: the predictive distribution of a Bayesian neural network, analytically, in one forward pass.

Names are imported when they are first used, so that `import propagauss` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from propagauss.version import __version__

if TYPE_CHECKING:
    from propagauss import baselines, links, metrics, tasks
    from propagauss.engines.linearise import linearise
    from propagauss.engines.streamline import streamline
    from propagauss.errors import InputError, PosteriorError, PropagaussError, UnsupportedOpError
    from propagauss.gaussian import Gaussian
    from propagauss.network.plan import Plan
    from propagauss.network.streamlined import Streamlined
    from propagauss.posteriors import (
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
    from propagauss.predictive.binary import BinaryClassifier
    from propagauss.predictive.classifier import Classifier
    from propagauss.predictive.heteroscedastic import HeteroscedasticRegressor
    from propagauss.predictive.loading import load
    from propagauss.predictive.predictions import Predictions
    from propagauss.predictive.regressor import Regressor
    from propagauss.rules import rule
    from propagauss.tuning.tune import tune

_HOMES = {
    "BinaryClassifier": "predictive.binary",
    "Classifier": "predictive.classifier",
    "DiagonalPosterior": "posteriors",
    "FullPosterior": "posteriors",
    "Gaussian": "gaussian",
    "HeteroscedasticRegressor": "predictive.heteroscedastic",
    "InputError": "errors",
    "KroneckerPosterior": "posteriors",
    "LowRankPosterior": "posteriors",
    "Plan": "network.plan",
    "Posterior": "posteriors",
    "PosteriorError": "errors",
    "Predictions": "predictive.predictions",
    "PropagaussError": "errors",
    "Regressor": "predictive.regressor",
    "Streamlined": "network.streamlined",
    "UnsupportedOpError": "errors",
    "fit_laplace": "posteriors",
    "from_ivon": "posteriors",
    "from_laplace": "posteriors",
    "from_swag": "posteriors",
    "linearise": "engines.linearise",
    "load": "predictive.loading",
    "load_posterior": "posteriors",
    "rule": "rules",
    "streamline": "engines.streamline",
    "tune": "tuning.tune",
}
_MODULES = ("baselines", "links", "metrics", "tasks")

__all__ = [
    "BinaryClassifier",
    "Classifier",
    "DiagonalPosterior",
    "FullPosterior",
    "Gaussian",
    "HeteroscedasticRegressor",
    "InputError",
    "KroneckerPosterior",
    "LowRankPosterior",
    "Plan",
    "Posterior",
    "PosteriorError",
    "Predictions",
    "PropagaussError",
    "Regressor",
    "Streamlined",
    "UnsupportedOpError",
    "__version__",
    "baselines",
    "fit_laplace",
    "from_ivon",
    "from_laplace",
    "from_swag",
    "linearise",
    "links",
    "load",
    "load_posterior",
    "metrics",
    "rule",
    "streamline",
    "tasks",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"propagauss.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'propagauss' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"propagauss.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
