"""One case: standard deviations of sampled weights, and how near each engine comes to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm

import propagauss as pg
from fidelity.cases import Case
from propagauss.tasks.fidelity_report import rank_correlation

SAMPLES = 10_000
AT_ONCE = 2**25  # numbers that are drawn together
Readings = dict[str, tuple[float, float, float]]  # engine -> sd ratio, rank correlation, mean error


@torch.no_grad()
def sampled(model: nn.Module, posterior: pg.Posterior, x: Tensor, title: str, count: int = SAMPLES) -> list[Tensor]:
    """Variances `[N, outputs]` of two halves of the samples, and of all of them."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    posterior, generator, draws = posterior.bind(parameters), torch.Generator().manual_seed(1), {}
    centre = model(x).double()  # deviations from it are small; sums of their squares lose nothing
    sums = [torch.zeros(2, *centre.shape, dtype=torch.float64) for _ in range(2)]
    size = sum(parameters[n].numel() for n in posterior.names)
    at_once = max(1, min(count, AT_ONCE // size))
    for s in tqdm(range(count), desc=title, disable=None, leave=False):
        if s % at_once == 0:
            draws = posterior.sample(min(at_once, count - s), generator)
        weights = {n: parameters[n] + d[s % at_once] for n, d in draws.items()}
        moved = functional_call(model, weights, (x,)).double() - centre
        sums[s >= count // 2] += torch.stack([moved, moved.square()])
    return [_variance(part, count // 2) for part in sums] + [_variance(sums[0] + sums[1], count)]


def _variance(sums: Tensor, count: int) -> Tensor:
    return (sums[1] - sums[0].square() / count) / (count - 1)


def engines(case: Case, wide: bool) -> dict[str, Callable[[nn.Module, pg.Posterior, Tensor], Any]]:
    found: dict[str, Callable[..., Any]] = {"diagonal": pg.streamline}
    if wide:
        found["moments"] = lambda *given: pg.streamline(*given, activation="moments")
    if case.full:
        found["full"] = lambda *given: pg.streamline(*given, covariance="full")
    found["linearised"] = lambda *given: pg.linearise(*given, covariance="diagonal")
    return found


@torch.no_grad()
def measure(case: Case, samples: int = SAMPLES) -> dict[str, Any]:
    """What is kept of a case."""
    with torch.enable_grad():
        model, posterior, x, y = case.build()
    accuracy = float((model(x).argmax(-1) == y).double().mean())
    posterior, x = posterior.scale(case.scale), x[: case.inputs]
    first, second, every = sampled(model, posterior, x, case.key, samples)
    readings: Readings = {}
    points = {"sampled": _by_input(every)}
    for name, engine in engines(case, wide=case.scale == 1).items():
        net = engine(model, posterior, x[:2])
        variance = torch.cat([net(some).variance for some in x.split(20)]).double()
        readings[name] = agreement(variance, every)
        points[name] = _by_input(variance)
    parameters = dict(model.named_parameters())
    size = sum(parameters[n].numel() for n in posterior.names)
    halves = agreement(first, second)[1]
    return {"parameters": size, "accuracy": accuracy, "halves": halves, "readings": readings, "points": points}


def _by_input(variance: Tensor) -> list[float]:
    """Standard deviations, averaged over outputs."""
    return variance.sqrt().mean(1).tolist()


def agreement(variance: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """Ratio of root mean squares, Spearman over inputs of means over outputs, mean error relative to the mean."""
    ours, theirs = variance.sqrt(), truth.sqrt()
    ratio = math.sqrt(float(variance.mean() / truth.mean()))
    error = float((ours - theirs).abs().mean() / theirs.mean())
    return ratio, rank_correlation(ours.mean(1), theirs.mean(1)), error
