"""How good a way to predict is on data that did not calibrate it: folds of the validation data.

Everything is computed from cached latents, so that a fold costs arithmetic and no pass of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.base import Held, Likelihood, Moments
from propagauss.likelihoods.categorical import IGNORED, CategoricalLikelihood
from propagauss.predictive import metrics
from propagauss.predictive.calibration import COARSE, TOLERANCE, HeldOut, calibrated, held_out

FOLDS = 5
CLASSES = ("classification", "binary")
POINTS = 2_000  # more of them cost time and tell no more about which candidate to take
TARGETS = 20_000  # the same for labels, of which a point may have very many: one for each pixel

Latents = Sequence[tuple[Gaussian, Tensor]]


@dataclass(frozen=True)
class Verdict:
    """What a candidate did on points that did not calibrate it."""

    losses: Tensor  # [N], -log p(y) of each point
    probs: Tensor | None  # [N, C] for classes
    labels: Tensor | None  # [N]
    kept: bool  # whether calibration kept a latent variance that matters, on most folds

    @property
    def nlpd(self) -> float:
        return self.losses.mean().item()

    @property
    def error(self) -> float:
        """Standard error of the NLPD."""
        return self.losses.std().item() / len(self.losses) ** 0.5 if len(self.losses) > 1 else 0.0

    @property
    def ece(self) -> float | None:
        return None if self.probs is None or self.labels is None else metrics.ece(self.probs, self.labels)

    @property
    def aurc(self) -> float | None:
        if self.probs is None or self.labels is None:
            return None
        confidence, top = self.probs.max(-1)
        return metrics.aurc(confidence, top == self.labels)


def judge(latents: Latents, likelihood: Likelihood, calibrate: bool) -> Verdict:
    """Calibrated on all folds but one, scored on that one, in turn; as it is, if it shall not be calibrated."""
    held = _some(held_out(latents, likelihood), likelihood)
    count = sum(len(y) for _, y in held.batches)
    if count < 2 * FOLDS:
        raise InputError(f"there are {count} validation points: give {2 * FOLDS} or more")
    fold = torch.randperm(count, generator=torch.Generator().manual_seed(0)) % FOLDS
    fold = fold if calibrate else torch.zeros_like(fold)
    losses, kept = torch.zeros(count, dtype=torch.float64), 0
    probs, labels = [], []
    for i in range(int(fold.max()) + 1):
        scale, fitted = 1.0, likelihood
        if calibrate:
            report, fitted = calibrated(part(held, fold != i, likelihood), likelihood, 1.0, TOLERANCE, COARSE)
            scale, kept = report.after, kept + (not report.is_plain)
        inside = [Held(moments.scaled(scale), y) for moments, y in part(held, fold == i, likelihood).batches]
        losses[fold == i] = torch.cat([_losses(fitted, each) for each in inside]) * (count / held.targets)
        for found in (_classes(fitted, each) for each in inside):
            if found is not None:
                probs.append(found[0])
                labels.append(found[1])
    joined = [torch.cat(each) if each else None for each in (probs, labels)]
    return Verdict(losses, joined[0], joined[1], 2 * kept > FOLDS)


def part(held: HeldOut, keep: Tensor, likelihood: Likelihood) -> HeldOut:
    """The rows for which `keep` holds: `[N]`, over all batches."""
    found, start = [], 0
    for moments, y in held.batches:
        rows = keep[start : start + len(y)]
        start += len(y)
        if rows.any():
            index = None if moments.index is None else moments.index[rows]
            found.append(Held(Moments(moments.mean[rows], moments.covariance[rows], index), y[rows]))
    return HeldOut.of(found, likelihood, held.dtype)


def _some(held: HeldOut, likelihood: Likelihood) -> HeldOut:
    """A random choice of rows, always the same, if there are many."""
    count = sum(len(y) for _, y in held.batches)
    if count > POINTS:
        keep = torch.zeros(count, dtype=torch.bool)
        keep[torch.randperm(count, generator=torch.Generator().manual_seed(1))[:POINTS]] = True
        held = part(held, keep, likelihood)
    if held.targets <= TARGETS or likelihood.pointwise:
        return held
    share = TARGETS / held.targets
    return HeldOut.of([_positions(each, share) for each in held.batches], likelihood, held.dtype)


def _positions(held: Held, share: float) -> Held:
    """Some of the positions of every point, with the classes in the last dimension."""
    (mean, covariance, index), y = held
    if y.dim() < 2 or index is not None:
        return held
    places = y[0].numel()
    chosen = torch.randperm(places, generator=torch.Generator().manual_seed(2))[: max(1, round(share * places))]
    inner = covariance.shape[mean.dim() - 1 :]
    covariance = covariance.reshape(len(y), places, *inner)[:, chosen]
    return Held(Moments(mean.reshape(len(y), places, -1)[:, chosen], covariance), y.reshape(len(y), places)[:, chosen])


def _losses(likelihood: Likelihood, held: Held) -> Tensor:
    densities = likelihood.log_predictive(*held)
    return -densities.reshape(len(densities), -1).sum(1)


def _classes(likelihood: Likelihood, held: Held) -> tuple[Tensor, Tensor] | None:
    """Probabilities `[N, C]` and labels `[N]` of all positions; None if the likelihood has no classes."""
    mean, covariance, index = held.moments
    if index is not None or likelihood.name not in CLASSES:
        return None
    width = mean.shape[-1]
    matrix = covariance.dim() > mean.dim()
    blocks = covariance.reshape(-1, width, width) if matrix else covariance.reshape(-1, width)
    flat = mean.reshape(-1, width)
    ignored = IGNORED
    if isinstance(likelihood, CategoricalLikelihood):  # moments have the classes last
        likelihood, ignored = replace(likelihood, class_dim=-1), likelihood.ignore_index
    predictive: Any = likelihood.predictive(Gaussian.full(flat, blocks) if matrix else Gaussian.diagonal(flat, blocks))
    labels = held.y.reshape(-1)
    if isinstance(predictive, Bernoulli):
        yes = predictive.probs.reshape(-1)
        return torch.stack([1 - yes, yes], -1), labels.long()
    assert isinstance(predictive, Categorical)
    counted = labels != ignored
    return predictive.probs[counted], labels[counted]
