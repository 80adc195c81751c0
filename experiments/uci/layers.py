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
from torch import Tensor, nn

from experiments.frame.experiment import Record
from experiments.uci.methods import STDDEV, gaussian_scores
from experiments.uci.posteriors import Fitted
from propagauss.demo.data import Split
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.posteriors import Posterior

JOINT, LAYERS, OURS, MOMENTS = "GLM", "GLM layer by layer", "ours", "ours, moment matching"


class LayerwiseGLM:
    """`N(f(x), J Σ Jᵀ)` for linear layers and ReLUs in sequence, with `Σ` cut into one block per layer.

    The covariance goes from layer to layer, `C ← W C Wᵀ + noise(a)`, with `a` the layer's input at the mean weights.
    Streamlining in the full structure is the same but for `noise`, which there also sees the covariance of `a`.
    """

    def __init__(self, model: nn.Sequential, posterior: Posterior):
        self.model = model
        bound = posterior.bind(dict(model.named_parameters()))
        self._noises = {
            number: bound.noise(f"{number}.weight", f"{number}.bias").for_covariance(random_input=False)
            for number, layer in enumerate(model)
            if isinstance(layer, nn.Linear)
        }

    def __call__(self, x: Tensor) -> Gaussian:
        covariance: Tensor | None = None
        for number, layer in enumerate(self.model):
            if number in self._noises:
                weight, noise = layer.get_parameter("weight"), self._noises[number].covariance(x, x, None)
                covariance = noise if covariance is None else weight @ covariance @ weight.mT + noise
            elif covariance is not None:
                slope = (x > 0).to(x)
                covariance = covariance * slope.unsqueeze(-1) * slope.unsqueeze(-2)
            x = layer(x)
        assert covariance is not None
        return Gaussian.full(x, (covariance + covariance.mT) / 2)


def compare(fitted: Fitted, split: Split) -> dict[str, Any]:
    """NLPD on the test part with a fitted scale, and the standard deviation at scale 1, of each."""
    assert isinstance(fitted.model, nn.Sequential)
    model, example = fitted.model, split.test[0][:2]
    makers: dict[str, Callable[[], Any]] = {
        JOINT: lambda: linearise(fitted.model, fitted.posterior, example),
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
