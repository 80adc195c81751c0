"""Temperature scaling of a plain model: the temperature of least NLPD on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from propagauss.errors import InputError
from propagauss.inputs import as_tensor, batches, call, device_of, explained, taken_by
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.likelihoods.temperature import TEMPERATURES, Tempered, gaps
from propagauss.predictive.calibration.held_out import as_double, require_targets
from propagauss.predictive.calibration.report import FitReport


def fit_temperature(model: Any, loader: Iterable[Any], start: float, progress: bool = True) -> FitReport:
    """`argmin_T mean -log softmax(logits / T)[y]`; `model` maps inputs to logits `[..., C]`."""
    likelihood, cached, points = CategoricalLikelihood(class_dim=-1), [], 0
    for x, y in batches(loader, taken_by(model), device_of(model), "caching logits" if progress else None):
        with torch.no_grad(), explained(model, x):
            logits = _finite(as_tensor(call(model, x)))
        labels = likelihood.targets(y.to(logits.device), logits.shape).cpu()
        cached.append(gaps(as_double(logits).log_softmax(-1), labels, labels != likelihood.ignore_index))
        points += likelihood.count(labels)
    require_targets(points)
    tempered = Tempered(cached)

    def nlpd(temperature: Tensor) -> float:
        return -sum(each.sum().item() for each in tempered.densities(temperature)) / points

    before = torch.tensor(start, dtype=torch.float64)
    best = tempered.best([before], TEMPERATURES, points)
    bounds = math.exp(TEMPERATURES[0]), math.exp(TEMPERATURES[1])
    return FitReport("temperature", start, best.item(), nlpd(before), nlpd(best), points, bounds=bounds)


def _finite(mean: Tensor) -> Tensor:
    if not mean.isfinite().all():
        raise InputError("the net returned values that are not finite: check its inputs and its weights")
    return mean
