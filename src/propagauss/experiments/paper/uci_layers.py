"""What one pass leaves out of a full posterior: the covariance between layers, measured on the first fold of each set.

    GLM:                 J Σ Jᵀ, all of the posterior
    GLM layer by layer:  the same with Σ cut into one block per layer
    ours:                those blocks, and the terms of second order of a random input times a random weight

Each with its scale fitted, so that the three differ only in how variance is spread over the points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from propagauss.baselines import GLM
from propagauss.experiments.data import Split
from propagauss.experiments.paper.experiment import Record
from propagauss.experiments.paper.mlp_predictors import LayerwiseGLM
from propagauss.experiments.paper.uci_methods import gaussian_scores
from propagauss.experiments.paper.uci_posteriors import Fitted
from propagauss.streamline import streamline

JOINT, LAYERS, OURS, MOMENTS = "GLM", "GLM layer by layer", "ours", "ours, moment matching"


def compare(fitted: Fitted, split: Split) -> dict[str, Any]:
    """NLPD on the test part with a fitted scale, and the spread at scale 1, of each."""
    assert isinstance(fitted.model, nn.Sequential)
    model, example = fitted.model, split.test[0][:2]
    makers: dict[str, Callable[[], Any]] = {
        JOINT: lambda: GLM(fitted.model, fitted.posterior),
        LAYERS: lambda: LayerwiseGLM(model, fitted.posterior),
        OURS: lambda: streamline(fitted.model, fitted.posterior, example, covariance="full"),
        MOMENTS: lambda: streamline(fitted.model, fitted.posterior, example, covariance="full", activation="moments"),
    }
    found = {}
    for name, make in makers.items():
        with torch.no_grad():
            scaled = gaussian_scores(name, make(), fitted, split)[1].as_dict()
        found[name] = {key: scaled[key] for key in ("nlpd", "rmse", "scale", "spread")}
    return found


def reading(record: Record) -> str:
    """How much of the distance between GLM and ours is due to the covariance between layers."""
    nlpd = {name: numbers["nlpd"] for name, numbers in record["scores"].items()}
    text = ", ".join(f"{name} {value:.3f}" for name, value in nlpd.items())
    gap, cut = nlpd[OURS] - nlpd[JOINT], nlpd[LAYERS] - nlpd[JOINT]
    share = f": the covariance between layers makes {100 * cut / gap:.0f}% of the gap" if gap > 0.002 else ""
    return f"First fold, all with a fitted scale: {text}{share}."
