"""Which experiments there are."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from propagauss.experiments.paper.experiment import Experiment

NAMES: dict[str, str] = {  # name -> module, in the order of the report
    "uci": "uci",
    "mnist": "mnist",
    "moments": "moments",
    "rotated": "rotated",
    "ood": "ood",
    "vit": "vit",
    "gpt": "gpt",
    "value-covariance": "value_covariance",
    "sensitivity": "sensitivity",
    "mc-samples": "mc_samples",
    "gaussianity": "gaussianity",
    "linearity": "linearity",
    "runtime": "runtime",
}


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    return importlib.import_module(f"propagauss.experiments.paper.{NAMES[name]}").EXPERIMENT
