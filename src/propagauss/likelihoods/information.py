"""How much of the entropy of a predicted class comes from not knowing the weights: its mutual information.

    I = H[E p] - E[H[p]] = E[KL(p ‖ E p)],    p the probabilities at one value of the latent

The right-hand side is a mean of terms that are not negative, so that little is lost to rounding where `I` is small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.gaussian import Gaussian
from propagauss.likelihoods.base import last_dimension
from propagauss.likelihoods.links import by_rows, log_probs_of_draws

POINTS, REACH = 321, 8.0  # of the rule for single logits


def entropy_of(log_probs: Tensor) -> Tensor:
    """`-Σ_c p_c log p_c`, in nats: `[..., C] -> [...]`."""
    return -(log_probs.exp() * log_probs).sum(-1)


def information(latent: Gaussian, samples: int = 512, seed: int = 0, temperature: float = 1.0) -> Tensor:
    """For the classes of a latent, with the covariance of the logits where there is one.

    With a temperature it is that of `softmax(m / T + e)`, `e` the deviation of the latent from its mean `m`: a link
    divides `m` by what the variance of `e` asks for, so that its probabilities to the power `1 / T` are those that it
    gives for `m / T + e`, and the information is a part of the entropy of what is predicted. That of `softmax(f / T)`
    is not: its variance has grown by `1 / T²`, of which the prediction knows nothing.

    Where only some classes are uncertain (`linearise(outputs=...)`), they share a fixed probability, and what is known
    about a label beyond that is known among them: their own information, times that probability.
    """
    chosen = latent.chosen
    mean, covariance = (latent.mean, last_dimension(latent)) if chosen is None else (chosen.mean, chosen.covariance)
    found = information_of_classes(mean / temperature, covariance, samples, seed)
    if chosen is None:
        return found
    return found * (latent.mean / temperature).softmax(-1).gather(-1, chosen.index).sum(-1)


def information_of_classes(mean: Tensor, covariance: Tensor, samples: int = 512, seed: int = 0) -> Tensor:
    """For `softmax(f)`, `f ~ N(mean, covariance)`, over fixed draws of `f`: `[..., C] -> [...]`.

    `covariance` is as links take it: variances `[..., C]`, or matrices `[..., C, C]`. Memory is bounded. Two classes
    are a single logit, their difference.
    """
    if mean.shape[-1] == 2:
        variance = _difference(covariance, matrix=covariance.dim() > mean.dim())
        return information_of_logits(mean[..., 1] - mean[..., 0], variance)
    return by_rows(lambda m, c: _divergence(log_probs_of_draws(m, c, samples, seed)), mean, covariance, samples)


def information_of_logits(mean: Tensor, variance: Tensor) -> Tensor:
    """For `σ(f)`, `f ~ N(mean, variance)`, entry by entry, by a trapezoidal rule over `f`. Memory is bounded.

    Within 1% for any variance: where the rule is too coarse for the step of `σ`, that step hardly matters.
    """
    z = torch.linspace(-REACH, REACH, POINTS, dtype=mean.dtype, device=mean.device)
    log_weights = (-z.square() / 2).log_softmax(0)

    def of_rows(mean: Tensor, variance: Tensor) -> Tensor:
        f = mean + variance.sqrt() * z  # [N, S]
        return _divergence(torch.stack([F.logsigmoid(f), F.logsigmoid(-f)], 1), log_weights)

    return by_rows(of_rows, mean.unsqueeze(-1), variance.unsqueeze(-1), 2 * POINTS)


def _difference(covariance: Tensor, matrix: bool) -> Tensor:
    """Variance of the difference of two logits."""
    if not matrix:
        return covariance.sum(-1)
    return (covariance.diagonal(dim1=-2, dim2=-1).sum(-1) - 2 * covariance[..., 0, 1]).clamp(min=0)


def _divergence(log_probs: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """`Σ_s w_s Σ_c p log(p / p̄)`: `[N, C, S] -> [N]`, the weights `[S]`, equal if not given."""
    if log_weights is None:
        log_weights = log_probs.new_full(log_probs.shape[-1:], -math.log(log_probs.shape[-1]))
    log_mean = (log_probs + log_weights).logsumexp(-1, keepdim=True)
    p = log_probs.exp()
    each = p * (log_probs - log_mean) - p + log_mean.exp()  # the last two cancel in the sum
    return (log_weights.exp() * each.sum(-2)).sum(-1).clamp(min=0)
