"""Which experiments there are."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.frame.experiment import Experiment

NAMES: dict[str, str] = {  # name -> module, in the order of the report
    "uci": "uci.uci",
    "mnist": "mnist.mnist",
    "moments": "mnist.moments",
    "rotated": "mnist.rotated",
    "ood": "tasks.ood",
    "calibration": "tasks.calibration",
    "uses": "uses.uses",
    "valla": "valla.valla",
    "selective": "selective.selective",
    "vit": "transformers.vit",
    "gpt": "transformers.gpt",
    "value-covariance": "transformers.value_covariance",
    "sensitivity": "tasks.sensitivity",
    "mc-samples": "cost.mc_samples",
    "gaussianity": "mnist.gaussianity",
    "linearity": "mnist.linearity",
    "runtime": "cost.runtime",
}


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    return importlib.import_module(f"experiments.{NAMES[name]}").EXPERIMENT
