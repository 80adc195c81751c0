"""One scale of the latent at a time: the likelihood's own numbers fitted to it, and the loss of every point.

loss_n(s) = -log E[p(y_n | f, θ_s)],  f ~ N(m_n, s C_n),    θ_s = argmin_θ mean_n loss_n
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from propagauss.likelihoods.base import Free, Likelihood
from propagauss.predictive.calibration.held_out import HeldOut
from propagauss.predictive.calibration.search import minimise_together

LOWEST = 1e-30  # a scale at which predictions are those of the plain model


@dataclass(frozen=True)
class Trial:
    """What the likelihood's numbers and the losses are at one scale."""

    scale: float
    numbers: Tensor | None
    losses: Tensor  # [N], one per data point; their mean is the NLPD

    @property
    def nlpd(self) -> float:
        return self.losses.mean().item()


class Trials:
    """Fits the numbers of the likelihood at any scale, each once; a fit starts at the one of the scale next to it."""

    def __init__(self, held: HeldOut, likelihood: Likelihood, bounded: bool = True):  # by `Free.bounds_beside`
        self._held, self._likelihood = held, likelihood
        self._free = likelihood.free(held.batches)
        self._bounds = self._free.bounds if self._free else []
        self._known: dict[float, Trial] = {}
        self.plain = self.at(LOWEST)
        beside = self._free.bounds_beside if self._free is not None and bounded else None
        if beside is not None and self.plain.numbers is not None:
            self._bounds = beside(self.plain.numbers)

    @property
    def name(self) -> str:
        return self._free.name if self._free else ""

    @property
    def known(self) -> list[Trial]:
        """All that were made, by their scale."""
        return [self._known[scale] for scale in sorted(self._known)]

    def at(self, scale: float) -> Trial:
        if scale not in self._known:
            self._known[scale] = self._fitted(scale)
        return self._known[scale]

    def likelihood_of(self, trial: Trial) -> Likelihood:
        free = self._free
        return self._likelihood if free is None or trial.numbers is None else free.replaced(trial.numbers)

    def is_at_end(self, trial: Trial) -> bool:
        if self._free is None or trial.numbers is None:
            return False
        low, high = torch.tensor(self._free.bounds).T
        logs = trial.numbers.log().flatten()
        return bool(((logs < low + 1e-3) | (logs > high - 1e-3)).any())

    def as_given(self, scale: float) -> float:
        """The NLPD with the numbers that the likelihood came with; there may be no predictive, so it may be inf."""
        return self._losses(densities_of(self._held, self._likelihood, scale)).mean().item()

    def _fitted(self, scale: float) -> Trial:
        free = self._free
        if free is None:
            return Trial(scale, None, self._losses(densities_of(self._held, self._likelihood, scale)))
        starts = [free.guess(scale)]
        if self._known:
            near = min(self._known, key=lambda s: abs(math.log(s / scale)))
            starts += [n for n in (self._known[near].numbers,) if n is not None]
        if free.at_scale is not None:
            kept = free.at_scale(scale)
            number = kept.best(starts, self._bounds[0], self._held.targets)
            return Trial(scale, number, self._losses(kept.densities(number)))
        densities = partial(self._densities_with, free, scale)
        numbers = minimise_together(densities, starts, self._bounds, self._held.targets)
        return Trial(scale, numbers, self._losses(densities(numbers)))

    def _densities_with(self, free: Free, scale: float, numbers: Tensor) -> list[Tensor]:
        return densities_of(self._held, free.replaced(numbers), scale)

    def _losses(self, densities: list[Tensor]) -> Tensor:
        rows = torch.cat([-each.detach().reshape(len(each), -1).sum(1) for each in densities])
        return (rows * (len(rows) / self._held.targets)).nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)


def densities_of(held: HeldOut, likelihood: Likelihood, scale: float) -> list[Tensor]:
    return [likelihood.log_predictive(moments.scaled(scale), y) for moments, y in held.batches]


def paired(losses: Tensor, others: Tensor) -> tuple[float, float]:
    """Mean of `losses - others` over the data points, and its standard error."""
    difference = losses - others
    mean = difference.mean().item()
    error = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return (mean, error) if math.isfinite(mean) and math.isfinite(error) else (math.inf, 0.0)
