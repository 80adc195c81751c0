"""How much of the entropy of a predicted class comes from not knowing the weights: its mutual information.

    I = H[E p] - E[H[p]] = E[KL(p ‖ E p)],    p the probabilities at one value of the latent

The right-hand side is a mean of terms that are not negative, so that little is lost to rounding where `I` is small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from propagauss.likelihoods.links import deviations

BUDGET = 2**24  # numbers held at once


def entropy_of(log_probs: Tensor) -> Tensor:
    """`-Σ_c p_c log p_c`, in nats: `[..., C] -> [...]`."""
    return -(log_probs.exp() * log_probs).sum(-1)


def information_of_classes(mean: Tensor, covariance: Tensor, samples: int = 512, seed: int = 0) -> Tensor:
    """For `softmax(f)`, `f ~ N(mean, covariance)`, over fixed draws of `f`: `[..., C] -> [...]`.

    `covariance` is as links take it: variances `[..., C]`, or matrices `[..., C, C]`. Memory is bounded.
    """
    classes, lead = mean.shape[-1], mean.shape[:-1]
    rows = mean.reshape(-1, classes)
    shaped = covariance.reshape(rows.shape[0], *covariance.shape[mean.dim() - 1 :])
    at_once = max(1, BUDGET // (samples * classes))
    parts = zip(rows.split(at_once), shaped.split(at_once), strict=True)
    found = [_divergence((m + deviations(m, c, samples, seed)).log_softmax(-1)) for m, c in parts]
    return torch.cat(found).reshape(lead) if found else mean.new_zeros(lead)


def _divergence(log_probs: Tensor) -> Tensor:
    """`mean_s Σ_c p log(p / p̄)`: `[S, N, C] -> [N]`."""
    log_mean = log_probs.logsumexp(0) - math.log(log_probs.shape[0])
    p = log_probs.exp()
    each = p * (log_probs - log_mean) - p + log_mean.exp()  # the last two cancel in the sum
    return each.sum(-1).mean(0).clamp(min=0)
