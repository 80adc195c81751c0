"""Normalisation with fixed statistics, and softmax.

Batch normalisation in evaluation mode is affine per channel: exact. Softmax and log-softmax are linearised through
their Jacobians, `J = diag(p) - p pᵀ` and `I - 1 pᵀ`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.arithmetic import add, multiply
from propagauss.rules.registry import Built, Site, builder, rule
from propagauss.rules.row_norm import _affine, _note, row_norm

aten = torch.ops.aten
Affine = Gaussian | Tensor | None


def _per_channel(t: Affine, dims: int) -> Any:
    """`[C] -> [1, C, 1, ...]`"""
    lift = (1, -1, *[1] * (dims - 2))
    if isinstance(t, Gaussian):
        return t.mapped(t.mean.reshape(lift), lambda u: u.reshape(lift))
    return None if t is None else t.reshape(lift)


def normalise_channels(
    x: Gaussian | Tensor, weight: Affine, bias: Affine, mean: Tensor, variance: Tensor, eps: float
) -> Gaussian:
    """`w (x - μ) / √(σ² + ε) + b` with fixed `μ`, `σ²`; the affine part may be random."""
    dims = len(x.shape)
    gain = (variance + eps).rsqrt()
    if isinstance(x, Gaussian) and not isinstance(weight, Gaussian) and not isinstance(bias, Gaussian):
        # the op itself, so that the mean is the model's own to the last bit
        own = aten.batch_norm(x.mean, weight, bias, mean, variance, False, 0.0, eps, False)
        return x.scaled(own, _per_channel(gain if weight is None else gain * weight, dims))
    gain, centre = _per_channel(gain, dims), _per_channel(mean, dims)
    y: Any = x.scaled((x.mean - centre) * gain, gain) if isinstance(x, Gaussian) else (x - centre) * gain
    if isinstance(weight, Gaussian) or isinstance(y, Gaussian):
        y = y if weight is None else multiply(y, _per_channel(weight, dims))
    elif weight is not None:
        y = y * _per_channel(weight, dims)
    return y if bias is None else add(y, _per_channel(bias, dims))


@rule(aten.batch_norm.default, note="fixed statistics: exact (a random scale and shift count as independent)")
def batch_norm(
    x: Any,
    weight: Affine,
    bias: Affine,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Gaussian:
    return normalise_channels(x, weight, bias, mean, variance, eps)


@rule(
    aten._native_batch_norm_legit_no_training.default,
    note="fixed statistics: exact (a random scale and shift count as independent)",
)
def native_batch_norm(
    x: Any, weight: Affine, bias: Affine, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Gaussian, Tensor, Tensor]:
    return normalise_channels(x, weight, bias, mean, variance, eps), mean, variance


@rule(aten.softmax.int, aten._softmax.default, note="linearised through its Jacobian")
def softmax(x: Gaussian, dim: int, dtype: Any = None) -> Gaussian:
    """`Σ_i J_ki² v_i = p_k² (v_k (1 - 2 p_k) + Σ_i p_i² v_i)`"""
    p = torch.softmax(x.mean, dim)

    def jacobian(t: Tensor) -> Tensor:
        return p * (t - (p * t).sum(dim, keepdim=True))

    def squared(v: Tensor) -> Tensor:
        return p.square() * ((1 - 2 * p) * v + (p.square() * v).sum(dim, keepdim=True)).clamp(min=0)

    return x.mapped(p, jacobian, squared)


@rule(aten.log_softmax.int, aten._log_softmax.default, note="linearised through its Jacobian")
def log_softmax(x: Gaussian, dim: int, dtype: Any = None) -> Gaussian:
    """`Σ_i J_ki² v_i = (1 - 2 p_k) v_k + Σ_i p_i² v_i`"""
    p = torch.softmax(x.mean, dim)

    def squared(v: Tensor) -> Tensor:
        return ((1 - 2 * p) * v + (p.square() * v).sum(dim, keepdim=True)).clamp(min=0)

    return x.mapped(torch.log_softmax(x.mean, dim), lambda t: t - (p * t).sum(dim, keepdim=True), squared)


@rule(aten.logsumexp.default, note="linearised through its gradient")
def logsumexp(x: Gaussian, dim: Any, keepdim: bool = False) -> Gaussian:
    p = torch.softmax(x.mean, dim[0]) if len(dim) == 1 else torch.exp(x.mean - x.mean.logsumexp(dim, keepdim=True))
    mean = x.mean.logsumexp(dim, keepdim)
    return x.mapped(mean, lambda t: (p * t).sum(dim, keepdim), lambda v: (p.square() * v).sum(dim, keepdim))


def group_norm(x: Gaussian | Tensor, groups: int, weight: Affine, bias: Affine, eps: float, jacobian: bool) -> Gaussian:
    """`w (x - μ) / σ + b` over the channels of a group and all places: `row_norm`, a row per group, affine per channel.

    Held statistics (`var = (w/σ)² v`) leave out terms of order 1 / group size: bad for groups of a few entries only.
    """
    m = x.mean if isinstance(x, Gaussian) else x
    size = torch.Size(m.shape[1:]).numel() // groups
    rows: Any = row_norm(_reshaped(x, (m.shape[0], groups, size)), [size], None, None, eps, True, jacobian)
    y = _reshaped(rows, m.shape)
    w, b = _per_channel(weight, m.dim()), _per_channel(bias, m.dim())
    if not isinstance(x, Gaussian) or isinstance(weight, Gaussian) or isinstance(bias, Gaussian):
        return _affine(y, w, b)
    # the op itself, so that the mean is the model's own to the last bit
    return y.scaled(aten.group_norm(m, groups, weight, bias, eps), m.new_ones(()) if w is None else w)


def _reshaped(x: Any, shape: Any) -> Any:
    if isinstance(x, Tensor):
        return x.reshape(shape)
    mean = x.mean.reshape(shape)
    return Gaussian.full(mean, x.covariance) if x.is_full else Gaussian.diagonal(mean, x.variance.reshape(shape))


@builder(aten.group_norm.default)
def build_group_norm(site: Site) -> Built:
    x, groups, weight, bias, eps, *_ = (*site.args, *(None, None, 1e-5)[len(site.args) - 2 :])
    jacobian = site.options.normalisation == "jacobian"
    return Built(group_norm, (x, groups, weight, bias, eps, jacobian), _note(site, jacobian))


@builder(aten.instance_norm.default)
def build_instance_norm(site: Site) -> Built:
    """With stored statistics batch normalisation, otherwise group normalisation with a group for each channel."""
    x, weight, bias, mean, variance, use_input_stats, _, eps, *_ = site.args
    if not use_input_stats:
        return Built(normalise_channels, (x, weight, bias, mean, variance, eps), "fixed statistics: exact")
    jacobian = site.options.normalisation == "jacobian"
    return Built(group_norm, (x, site.shape(x)[1], weight, bias, eps, jacobian), _note(site, jacobian))
