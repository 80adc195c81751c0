"""Links: from a Gaussian over logits to log-probabilities of classes, `log E[softmax(f)]` for `f ~ N(mean, C)`.

Pure functions `link(mean, covariance)`: `mean [..., C]`, and `covariance` either variances `[..., C]` or a matrix
`[..., C, C]`; the result is `[..., C]`, normalised. All are differentiable, work in log space and never branch on
values.

The integral has no closed form. All but `bridge` tend to the softmax as the variance vanishes; `mean_field`,
`monte_carlo` and `bridge` use covariances. How far each may be from the integral is pinned in tests/test_likelihood.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from propagauss.checks import floating, whole
from propagauss.checks import seed as checked_seed
from propagauss.errors import InputError

Link = Callable[[Tensor, Tensor], Tensor]

MOST_SAMPLES = 2**20  # more take gigabytes, and change nothing that can be seen
BUDGET = 2**24  # numbers held at once
CACHED = 2**18  # the same on a CPU, which takes several times as long for what does not fit into its cache
_PROBIT = math.pi / 8  # MacKay's constant: sigmoid(x) is close to Φ(x √(π/8))


def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """`softmax(m / √(1 + π/8 v))`: each logit is shrunk by its own variance.

    Right for two classes of which one has a fixed logit (error below 0.02). With several random logits it ignores that
    only their differences matter, so a class with a large variance is shrunk towards zero rather than towards the
    others: adding a constant to all logits changes the result, and the arg max may change.
    """
    return (mean / (1 + _PROBIT * _variance(mean, covariance)).sqrt()).log_softmax(-1)


def mean_field(mean: Tensor, covariance: Tensor) -> Tensor:
    """`p_i ∝ 1 / Σ_j exp(-(m_i - m_j) / √(1 + π/8 s_ij))`, `s_ij = v_i + v_j - 2 C_ij` (Lu, Ie and Sha, 2021).

    Every pair of classes is treated as a two-class problem with the variance of their difference, so what all logits
    have in common does not matter. For two classes it keeps the arg max of the mean and is within 0.02 of the integral;
    with many classes and variances far above 1 it is too even. Time and memory grow with the square of the
    number of classes.
    """
    v = _variance(mean, covariance)
    pairwise = v.unsqueeze(-1) + v.unsqueeze(-2)
    if _is_covariance(mean, covariance):
        # rounding may push the variance of a difference of nearly equal logits below zero
        pairwise = (pairwise - 2 * covariance).clamp(min=0)
    difference = mean.unsqueeze(-1) - mean.unsqueeze(-2)
    return (-torch.logsumexp(-difference / (1 + _PROBIT * pairwise).sqrt(), -1)).log_softmax(-1)


def monte_carlo(mean: Tensor, covariance: Tensor, samples: int = 512, seed: int = 0) -> Tensor:
    """`log 1/S Σ_s softmax(m + R z_s)`, `R Rᵀ = C`: sampling of the logits only, with the same draws for every input.

    The draws are a scrambled Sobol sequence and its negatives: deterministic, with less error than as many independent
    draws. Bad for hundreds of classes with
    variances far above 1, where single draws dominate. Memory is bounded, but once compiled it is `samples` times that
    of the mean.
    """

    def averaged(mean: Tensor, covariance: Tensor) -> Tensor:
        drawn = log_probs_of_draws(mean, covariance, samples, seed)
        return torch.logsumexp(drawn, -1) - math.log(drawn.shape[-1])

    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return averaged(mean, covariance)
    _is_covariance(mean, covariance)
    return by_rows(averaged, mean, covariance, whole(samples, "samples", 2, MOST_SAMPLES))


def by_rows(function: Link, mean: Tensor, covariance: Tensor, samples: int) -> Tensor:
    """`function(mean, covariance)`, which makes `samples` numbers of each one in `mean`, for some rows after others."""
    classes, lead = mean.shape[-1], torch.broadcast_shapes(mean.shape[:-1], covariance.shape[: mean.dim() - 1])
    inner = covariance.shape[mean.dim() - 1 :]
    rows = (mean.expand(*lead, classes).reshape(-1, classes), covariance.expand(*lead, *inner).reshape(-1, *inner))
    at_once = max(1, (CACHED if mean.device.type == "cpu" else BUDGET) // (samples * classes))
    found = torch.cat([function(*some) for some in zip(*(t.split(at_once) for t in rows), strict=True)])
    return found.reshape(*lead, *found.shape[1:])


def log_probs_of_draws(mean: Tensor, covariance: Tensor, samples: int, seed: int) -> Tensor:
    """`log softmax(m + R z_s)`, `R Rᵀ = C`, for fixed draws `z_s` and their negatives: `[..., C, S]`.

    The draws are last, since PyTorch takes several times as long for a softmax over a last dimension that is short;
    over any other one, its own softmax adds thousands of classes up without care for their rounding.
    """
    moved = mean.unsqueeze(-1) + _deviations(mean, covariance, samples, seed)
    return moved - moved.logsumexp(-2, keepdim=True)


def _deviations(mean: Tensor, covariance: Tensor, samples: int, seed: int) -> Tensor:
    """`R z_s`: `[..., C, S]`."""
    matrix = _is_covariance(mean, covariance)
    samples, seed = whole(samples, "samples", 2, MOST_SAMPLES), checked_seed(seed)
    # antithetic pairs keep the gradient right where the variance vanishes; the slack keeps it finite there
    slack = torch.finfo(mean.dtype).eps
    draws = _draws(samples, int(mean.shape[-1]), seed).to(mean)  # [C, S]
    if matrix:
        largest = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        # singular covariances need a nudge: as much rounding as a Gaussian is allowed to have
        return _root(covariance + slack * (1 + 1e3 * largest) * identity) @ draws
    return (covariance + slack).sqrt().unsqueeze(-1) * draws


def bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Dirichlet with `α_i = (1 - 2/K + exp(m_i) Σ_j exp(-m_j) / K²) / v_i` (Hobbhahn et al., 2022).

    Two steps come first. Logits are projected to sum to zero, which leaves their softmax as it is (laplace-torch
    conditions on a zero sum instead, which is not the same unless all variances are equal). Where the average variance
    exceeds `√(K/2)`, mean and variance are rescaled to it (the authors' correction; for smaller variances it would make
    predictions far too sure).

    Known failures: for more than two classes it is not the softmax at zero variance; classes with a small variance gain
    probability whatever their mean; and below the correction only ratios of variances count, so that `fit_scale` finds
    nothing to fit. It is here for comparison: `mean_field` costs little more.
    """
    v = _variance(mean, covariance)
    classes = int(mean.shape[-1])
    if _is_covariance(mean, covariance):
        rows = covariance.sum(-1)
        v = (v - 2 / classes * rows + rows.sum(-1, keepdim=True) / classes**2).clamp(min=0)
    else:
        v = (1 - 2 / classes) * v + v.sum(-1, keepdim=True) / classes**2
    v = v + torch.finfo(v.dtype).eps * (1 + v.mean(-1, keepdim=True))  # equal variances in the limit of none
    excess = (v.mean(-1, keepdim=True) / math.sqrt(classes / 2)).clamp(min=1)
    m = (mean - mean.mean(-1, keepdim=True)) / excess.sqrt()
    log_alpha = m + torch.logsumexp(-m, -1, keepdim=True) - 2 * math.log(classes)
    if classes > 2:
        log_alpha = torch.logaddexp(log_alpha, torch.full_like(log_alpha, math.log(1 - 2 / classes)))
    return (log_alpha - v.log()).log_softmax(-1)


def shared(link: Link, mean: Tensor, index: Tensor, covariance: Tensor) -> Tensor:
    """A link among the classes `index [..., k]` alone, with their covariance; the other logits are certain.

    The k classes share the probability that the plain softmax gives to them together, as the link on their logits
    deals it out; the others keep theirs. A link over all classes would move probability to those that are certain
    only because nobody asked.
    """
    plain = mean.log_softmax(-1)
    together = plain.gather(-1, index).logsumexp(-1, keepdim=True)
    return plain.scatter(-1, index, together + link(mean.gather(-1, index), covariance))


def categorical(logits: Tensor) -> Categorical:
    """`Categorical(logits=logits)`, also for an empty batch (on which the check of its own arguments fails)."""
    if not torch.compiler.is_compiling() and not floating(logits, "the tensor of logits").dim():
        raise InputError("the logits have no dimensions: give [..., classes]")
    try:
        return Categorical(logits=logits, validate_args=checked(logits))
    except ValueError as error:  # of its own check of the values
        raise InputError("the logits have NaN values: check the inputs and the weights of the model") from error


def checked(logits: Tensor) -> bool | None:
    """Whether a distribution should look at its arguments: also after torch.compile, which turns that off for all."""
    return None if torch.compiler.is_compiling() else logits.numel() > 0


LINKS: dict[str, Link] = {"probit": probit, "mean_field": mean_field, "monte_carlo": monte_carlo, "bridge": bridge}


def _root(covariance: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(covariance)
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise InputError("the covariance of the logits is not positive semi-definite, or not finite") from error


def _is_covariance(mean: Tensor, covariance: Tensor) -> bool:
    if not torch.compiler.is_compiling():
        _check_moments(mean, covariance)
    if covariance.dim() - mean.dim() not in (0, 1) or covariance.shape[-1] != mean.shape[-1]:
        raise InputError(
            f"the mean has shape {tuple(mean.shape)} and the covariance {tuple(covariance.shape)}: give variances of "
            "the same shape, or covariances with one more dimension of that size"
        )
    return covariance.dim() > mean.dim()


def _check_moments(mean: Any, covariance: Any) -> None:
    """Types and sizes alone: values are not looked at."""
    floating(mean, "the mean of the logits")
    floating(covariance, "the covariance of the logits")
    if not mean.dim():
        raise InputError("the mean of the logits has no dimensions: give [..., classes]")
    lead = covariance.shape[: mean.dim()]
    if len(lead) == mean.dim() and any(n != m and 1 not in (n, m) for n, m in zip(lead, mean.shape, strict=True)):
        raise InputError(
            f"the mean of the logits has shape {tuple(mean.shape)} and their covariance {tuple(covariance.shape)}: "
            "give variances of the same shape, or covariances with one more dimension"
        )


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1) if _is_covariance(mean, covariance) else covariance


def _draws(samples: int, classes: int, seed: int) -> Tensor:
    return torch.from_numpy(_standard_normals(samples, classes, seed))


# all that torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes seconds
_draws._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=8)
def _standard_normals(samples: int, classes: int, seed: int) -> np.ndarray:
    """Standard normal draws and their negatives: `[classes, 2 ⌈samples/2⌉]`."""
    from scipy.special import ndtri  # slow to import, and only this link needs them
    from scipy.stats import qmc

    pairs, rng = (samples + 1) // 2, np.random.default_rng(seed)
    if classes > qmc.Sobol.MAXDIM:
        half = rng.standard_normal((pairs, classes))
    else:
        # a whole power of two, of which the first `pairs` are used: the sequence is balanced only then
        uniform = qmc.Sobol(classes, rng=rng).random_base2(math.ceil(math.log2(pairs)))[:pairs]
        half = ndtri(uniform.clip(1e-12, 1 - 1e-12))
    return np.ascontiguousarray(np.concatenate([half, -half]).T)
