"""What one pass leaves out of a full posterior (covariance between layers), and what it adds (terms of second order).

    GLM:                 J Σ Jᵀ, all of the posterior
    GLM layer by layer:  the same with Σ cut into one block per layer
    ours:                those blocks, and the terms of second order of a random input times a random weight

Each with its scale fitted, so that the three differ only in how variance is shared out among the points.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from experiments.frame.experiment import Record
from experiments.methods.mlp import LayerwiseGLM
from experiments.uci.methods import STDDEV, gaussian_scores
from experiments.uci.posteriors import Fitted
from propagauss.demo.data import Split
from propagauss.engines.streamline import streamline
from propagauss.predictive.baselines import GLM

JOINT, LAYERS, OURS, MOMENTS = "GLM", "GLM layer by layer", "ours", "ours, moment matching"


def compare(fitted: Fitted, split: Split) -> dict[str, Any]:
    """NLPD on the test part with a fitted scale, and the standard deviation at scale 1, of each."""
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
        found[name] = {key: scaled[key] for key in ("nlpd", "rmse", "scale", STDDEV)}
    return found


def mean(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Over the folds that were measured: NLPD; medians of scale and standard deviation."""
    scores = [r["scores"] for r in records]
    return {
        name: {"nlpd": statistics.fmean(s[name]["nlpd"] for s in scores)}
        | {key: statistics.median(s[name][key] for s in scores) for key in ("scale", STDDEV)}
        for name in scores[0]
    }


def reading(records: Sequence[Record]) -> str:
    """Where the distance between GLM and ours comes from."""
    nlpd = {name: numbers["nlpd"] for name, numbers in mean(records).items()}
    cut, second = nlpd[LAYERS] - nlpd[JOINT], nlpd[OURS] - nlpd[LAYERS]
    folds = "In the first fold" if len(records) == 1 else f"Over {len(records)} folds"
    return (
        f"{folds}, with fitted scales, GLM has {nlpd[JOINT]:.3f}; without the covariance between layers it has "
        f"{nlpd[LAYERS]:.3f} ({cut:+.3f}), and the terms of second order that ours has as well make it "
        f"{nlpd[OURS]:.3f} ({second:+.3f})."
    )
