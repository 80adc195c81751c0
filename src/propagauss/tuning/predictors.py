"""Which predictor a likelihood goes with."""

from __future__ import annotations

import importlib
from typing import Any

from propagauss.likelihoods import LIKELIHOODS
from propagauss.predictive.predictor import Predictor

DOORS = {  # likelihood -> module and class; any other is predicted by `Predictor`
    "classification": ("classifier", "Classifier"),
    "binary": ("binary", "BinaryClassifier"),
    "regression": ("regressor", "Regressor"),
    "heteroscedastic": ("heteroscedastic", "HeteroscedasticRegressor"),
}


def predictor(net: Any, likelihood: str, link: str = "") -> Predictor:
    if likelihood not in DOORS:
        return Predictor(net, LIKELIHOODS[likelihood]())
    module, name = DOORS[likelihood]
    door = getattr(importlib.import_module(f"propagauss.predictive.{module}"), name)
    return door(net, link=link) if link else door(net)
