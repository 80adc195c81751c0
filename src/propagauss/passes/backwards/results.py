"""The small functions at both ends of the backward walk: where it starts, and what it ends in."""

from __future__ import annotations

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.adjoints.forms import weighted


def seed(eye: Tensor, y: Tensor) -> Tensor:
    """The identity for every sample: `[K, B, ...]`."""
    return eye.expand(-1, y.shape[0], *([-1] * (eye.dim() - 2)))


def weight_rows(w: Tensor, y: Tensor) -> Tensor:
    """The identity pulled back through `y = x Wᵀ + b`: the rows of the weight, for every sample."""
    return w.unsqueeze(1).expand(-1, y.shape[0], -1)


def of_input(g: Tensor, x: Gaussian, full: bool) -> Tensor:
    """`g C gᵀ` for an uncertain input with covariance `C`."""
    rows = g.flatten(2)
    if not x.is_full:
        return weighted(rows, x.variance.flatten(1), full)
    moved = rows.transpose(0, 1) @ x.covariance  # [B, K, n]
    if full:
        return moved @ rows.permute(1, 2, 0)
    return (moved * rows.transpose(0, 1)).sum(-1)


def full_covariance(mean: Tensor, covariance: Tensor) -> Gaussian:
    return Gaussian.full(mean, (covariance + covariance.mT) / 2)


def diagonal(mean: Tensor, variance: Tensor) -> Gaussian:
    return Gaussian.diagonal(mean, variance.reshape(mean.shape))


def certain(mean: Tensor, full: bool) -> Gaussian:
    """An output that nothing random reaches."""
    if not full:
        return Gaussian.diagonal(mean, torch.zeros_like(mean))
    flat = mean.flatten(1)
    return Gaussian.full(mean, (flat * 0).unsqueeze(-1) * flat.unsqueeze(-2))
