"""Sampling of the weights for larger networks: one draw at a time over all batches, so that none has to be kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.func import functional_call

from experiments.methods.classify import Batches, Label, Predictor
from propagauss.posteriors import Posterior

LEAST, FIRST, LAST = -6, 1, 6  # decades of the scale; beyond the first eight only while the loss falls there


@dataclass(frozen=True)
class Draws:
    """`1/S Σ_s softmax(f(x, w + √scale ε_s))`: the draws depend on the seed and their number only."""

    model: nn.Module
    posterior: Posterior
    samples: int
    seed: int = 0
    scale: float = 1.0

    @torch.no_grad()
    def log_probs(self, inputs: Sequence[Tensor]) -> Tensor:
        """`[N, C]`, of all batches."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        bound, total = self.posterior.bind(parameters), None
        for s in range(self.samples):
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + s)
            deviations = bound.sample(1, generator)
            weights = {n: parameters[n] + math.sqrt(self.scale) * d[0] for n, d in deviations.items()}
            latents = torch.cat([functional_call(self.model, weights, (x,)) for x in inputs])
            found = latents.log_softmax(-1)
            total = found if total is None else torch.logaddexp(total, found)
        assert total is not None
        return total - math.log(self.samples)


@dataclass(frozen=True)
class Sampled(Predictor):
    """A predictor that goes over all batches for each draw, rather than over all draws for each batch."""

    draws: Draws

    def __call__(self, inputs: Iterable[Tensor]) -> Tensor:
        return self.draws.log_probs(list(inputs))


def sampling(
    model: nn.Module,
    posterior: Posterior,
    name: str,
    validation: Batches,
    samples: int,
    fit_samples: int,
    fit_points: int,
    seed: int = 0,
) -> list[Predictor]:
    """Averages over draws of the weights: from the posterior as it is, and with its scale fitted.

    The fit uses the first `fit_samples` draws on about `fit_points` validation points.
    """
    some = _some(validation, fit_points)
    inputs, labels = [x for x, _ in some], torch.cat([y for _, y in some])
    few = Draws(model, posterior, fit_samples, seed)

    def nlpd(scale: float) -> float:
        log_probs = replace(few, scale=scale).log_probs(inputs)
        return -log_probs.gather(1, labels[:, None]).double().mean().item()

    draws = Draws(model, posterior, samples, seed)
    return [_predictor(draws, name, False), _predictor(replace(draws, scale=best_scale(nlpd)), name, True)]


def best_scale(nlpd: Callable[[float], float]) -> float:
    """The least of a few over many decades, then a search around it; coarser than `calibration.minimise`, and cheaper.

    Every trial runs the network on all points for each draw.
    """
    values = {decade: nlpd(10.0**decade) for decade in range(LEAST, FIRST + 1)}
    while (at := min(values, key=lambda d: values[d])) == max(values) < LAST:
        values[at + 1] = nlpd(10.0 ** (at + 1))
    around = [max(at - 1, LEAST) * math.log(10), min(at + 1, LAST) * math.log(10)]
    fine: Any = minimize_scalar(lambda t: nlpd(math.exp(t)), bounds=around, method="bounded", options={"xatol": 0.1})
    return math.exp(fine.x) if fine.fun < values[at] else 10.0**at


def _predictor(draws: Draws, name: str, fitted: bool) -> Predictor:
    label = Label("sampling", name, scale=draws.scale, fitted=fitted)
    return Sampled(label, lambda x: draws.log_probs([x]), draws)


def _some(batches: Batches, points: int) -> list[tuple[Tensor, Tensor]]:
    """Every k-th point, so that batches sorted by length are all there."""
    step = max(1, sum(len(y) for _, y in batches) // points)
    chosen, seen = [], 0
    for x, y in batches:
        rows = [i for i in range(len(y)) if (seen + i) % step == 0]
        seen += len(y)
        if rows:
            chosen.append((x[rows], y[rows]))
    return chosen
