"""Sampling with many draws, kept as averages over blocks: metrics for any number of draws, and how much they vary.

A stream of 50,000 draws holds 500 separate predictions with 100 draws, 50 with 1,000, one with 50,000: each number of
draws is judged by all the separate predictions that the stream has of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from tqdm import tqdm

from propagauss.demo.methods import mixture_log_density
from propagauss.posteriors import Posterior

TEST = {"uci": 500, "images": 1000, "vit": 500}  # test points at most
NLPD_STDDEV, SECOND_STDDEV = "nlpd_spread", "second_spread"  # their names in stored results


@dataclass(frozen=True)
class Draws:
    """Networks drawn from a posterior, some at a time."""

    model: nn.Module
    posterior: Posterior
    seed: int = 0
    vectorised: bool = True  # else one network after the other, for models that torch.vmap is slow with

    @torch.no_grad()
    def outputs(self, x: Tensor, block: int, total: int) -> Iterator[Tensor]:
        """`[block, n, ...]`, `total` draws in all."""
        means = {name: p.detach() for name, p in self.model.named_parameters()}
        bound, generator = self.posterior.bind(means), torch.Generator().manual_seed(self.seed)
        for _ in range(0, total, block):
            drawn = bound.sample(block, generator)
            yield self._run({name: means[name] + d for name, d in drawn.items()}, x)

    def _run(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        if self.vectorised:
            return vmap(lambda w: functional_call(self.model, w, (x,)))(weights)
        count = len(next(iter(weights.values())))
        each = ({n: w[s] for n, w in weights.items()} for s in range(count))
        return torch.stack([functional_call(self.model, w, (x,)) for w in each])


@dataclass(frozen=True)
class Target:
    """What is predicted, and how a block of outputs `[b, n, ...]` becomes an average that can be averaged on."""

    y: Tensor
    noise: float | None = None  # None: classes

    def block(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """`log mean p` (of `y`, or of every class) and the mean that the second metric needs."""
        outputs = outputs.double()
        if self.noise is not None:
            return mixture_log_density(outputs, self.y.double(), self.noise), outputs.mean(0)
        log_probs = outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))
        return log_probs, log_probs

    def metrics(self, logs: Tensor, means: Tensor) -> tuple[float, float]:
        """NLPD, and RMSE or accuracy, of averages over blocks `[k, ...]`."""
        log_mean = logs.logsumexp(0) - math.log(len(logs))
        if self.noise is not None:
            return -log_mean.mean().item(), (means.mean(0) - self.y).square().mean().sqrt().item()
        right = log_mean.argmax(-1) == self.y
        return -log_mean.gather(1, self.y[:, None]).mean().item(), right.double().mean().item()


def curve(
    draws: Draws, x: Tensor, target: Target, counts: Sequence[int], title: str = "draws"
) -> list[dict[str, float]]:
    """For each number of draws (multiples of the first): the metrics of separate predictions, mean and stddev."""
    block, total = counts[0], counts[-1]
    found = draws.outputs(x, block, total)
    shown = tqdm(found, desc=title, total=total // block, leave=False, disable=None)
    logs, means = (torch.stack(part) for part in zip(*(target.block(o) for o in shown), strict=True))
    return [_at(logs, means, target, count, count // block) for count in counts]


def _at(logs: Tensor, means: Tensor, target: Target, count: int, blocks: int) -> dict[str, Any]:
    groups = len(logs) // blocks
    parts = (slice(g * blocks, (g + 1) * blocks) for g in range(groups))
    nlpd, second = zip(*(target.metrics(logs[p], means[p]) for p in parts), strict=True)
    stddev = (lambda v: statistics.stdev(v)) if groups > 1 else (lambda v: None)
    return {
        "samples": count,
        "predictions": groups,
        "nlpd": statistics.fmean(nlpd),
        NLPD_STDDEV: stddev(nlpd),
        "second": statistics.fmean(second),
        SECOND_STDDEV: stddev(second),
    }


def saturation(points: Sequence[dict[str, Any]], tolerance: float) -> int:
    """The least number of draws from which on the mean NLPD is within `tolerance` of that with most draws."""
    last = points[-1]["nlpd"]
    good = points[-1]["samples"]
    for point in reversed(points):
        if abs(point["nlpd"] - last) > tolerance:
            break
        good = point["samples"]
    return good


def reaches(points: Sequence[dict[str, Any]], level: float) -> int | None:
    """The least number of draws with a mean NLPD of at most `level`."""
    return next((p["samples"] for p in points if p["nlpd"] <= level), None)


def some(pair: tuple[Tensor, Tensor], most: int) -> tuple[Tensor, Tensor]:
    """At most so many points, chosen at random but always the same."""
    rows = torch.randperm(len(pair[0]), generator=torch.Generator().manual_seed(0))[:most]
    return pair[0][rows], pair[1][rows]
