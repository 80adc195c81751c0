"""Normalisation with fixed statistics, and softmax.

Batch normalisation in evaluation mode is affine per channel: exact. Softmax and log-softmax are linearised through
their Jacobians, `J = diag(p) - p pᵀ` and `I - 1 pᵀ`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.registry import Built, Site, builder, rule
from propagauss.rules.statistics.affine import Affine, affine, cross_covariance, own_variance, second_moment
from propagauss.rules.statistics.row_norm import normalisation_note, row_norm, whole_jacobian

aten = torch.ops.aten


def _per_channel(t: Affine, dims: int) -> Any:
    """`[C] -> [1, C, 1, ...]`"""
    lift = (1, -1, *[1] * (dims - 2))
    if isinstance(t, Gaussian):
        return t.reshaped(lift)
    return None if t is None else t.reshape(lift)


def normalise_channels(
    x: Gaussian | Tensor,
    weight: Affine,
    bias: Affine,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    cross: Tensor | None = None,
) -> Gaussian:
    """`w (x - μ) / √(σ² + ε) + b` with fixed `μ`, `σ²`; the affine part may be random."""
    m = mean_of(x)
    # the op itself, so that the mean is the model's own to the last bit
    own = aten.batch_norm(m, mean_of(weight), mean_of(bias), mean, variance, False, 0.0, eps, False)
    gain = (variance + eps).rsqrt()
    if isinstance(x, Gaussian) and not isinstance(weight, Gaussian) and not isinstance(bias, Gaussian):
        return x.scaled(own, _per_channel(gain if weight is None else gain * weight, m.dim()))
    unit = aten.batch_norm(m, None, None, mean, variance, False, 0.0, eps, False)
    w, b = _per_channel(weight, m.dim()), _per_channel(bias, m.dim())
    if isinstance(weight, Gaussian) and not weight.is_full:  # in few passes over the data
        total = own_variance(unit, w, b, cross)
        if isinstance(x, Gaussian):
            total = torch.addcmul(total, x.variance, _per_channel(gain.square() * second_moment(weight), m.dim()))
        return Gaussian.diagonal(own, total)
    normalised = x.scaled(unit, _per_channel(gain, m.dim())) if isinstance(x, Gaussian) else unit
    return affine(normalised, w, b, cross).with_mean(own)


@builder(aten.batch_norm.default, broadcasts=True, training_flag=(5, "training"))
def build_batch_norm(site: Site) -> Built:
    x, weight, bias, mean, variance, _, _, eps, *_ = site.args
    cross = cross_covariance(site, weight, bias, channels_of=len(site.shape(x)))
    return Built(normalise_channels, (x, weight, bias, mean, variance, eps, cross), "fixed statistics: exact")


@builder(aten._native_batch_norm_legit_no_training.default, broadcasts=True)
def build_native_batch_norm(site: Site) -> Built:
    x, weight, bias, mean, variance, _, eps = site.args
    cross = cross_covariance(site, weight, bias, channels_of=len(site.shape(x)))
    return Built(native_batch_norm, (x, weight, bias, mean, variance, eps, cross), "fixed statistics: exact")


def native_batch_norm(
    x: Any, weight: Affine, bias: Affine, mean: Tensor, variance: Tensor, eps: float, cross: Tensor | None = None
) -> tuple[Gaussian, Tensor, Tensor]:
    return normalise_channels(x, weight, bias, mean, variance, eps, cross), mean, variance


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


@rule(aten.logsumexp.default, note="linearised through its gradient", reduces=True)
def logsumexp(x: Gaussian, dim: Any, keepdim: bool = False) -> Gaussian:
    p = torch.softmax(x.mean, dim[0]) if len(dim) == 1 else torch.exp(x.mean - x.mean.logsumexp(dim, keepdim=True))
    mean = x.mean.logsumexp(dim, keepdim)
    return x.mapped(mean, lambda t: (p * t).sum(dim, keepdim), lambda v: (p.square() * v).sum(dim, keepdim))


def group_norm(
    x: Gaussian | Tensor,
    groups: int,
    weight: Affine,
    bias: Affine,
    eps: float,
    jacobian: bool,
    cross: Tensor | None = None,
) -> Gaussian:
    """`w (x - μ) / σ + b` over the channels of a group and all places: `row_norm`, a row per group, affine per channel.

    Held statistics (`var = (w/σ)² v`) leave out terms of order 1 / group size: bad for groups of a few entries only.
    """
    m = mean_of(x)
    size = torch.Size(m.shape[1:]).numel() // groups
    rows: Any = row_norm(_reshaped(x, (m.shape[0], groups, size)), [size], None, None, eps, True, jacobian)
    y = _reshaped(rows, m.shape)
    w, b = _per_channel(weight, m.dim()), _per_channel(bias, m.dim())
    if not isinstance(x, Gaussian) or isinstance(weight, Gaussian) or isinstance(bias, Gaussian):
        return affine(y, w, b, cross)
    # the op itself, so that the mean is the model's own to the last bit
    return y.scaled(aten.group_norm(m, groups, weight, bias, eps), m.new_ones(()) if w is None else w)


def _reshaped(x: Any, shape: Any) -> Any:
    return x.reshape(shape) if isinstance(x, Tensor) else x.reshaped(shape)


@builder(aten.group_norm.default, broadcasts=True)
def build_group_norm(site: Site) -> Built:
    args: Any = (*site.args, *(None, None, 1e-5)[len(site.args) - 2 :])
    x, groups, weight, bias, eps, *_ = args
    return _group_norm_at(site, x, groups, weight, bias, eps)


@builder(aten.instance_norm.default, broadcasts=True)
def build_instance_norm(site: Site) -> Built:
    """With stored statistics batch normalisation, otherwise group normalisation with a group for each channel."""
    x, weight, bias, mean, variance, use_input_stats, _, eps, *_ = site.args
    if not use_input_stats:
        cross = cross_covariance(site, weight, bias, channels_of=len(site.shape(x)))
        return Built(normalise_channels, (x, weight, bias, mean, variance, eps, cross), "fixed statistics: exact")
    return _group_norm_at(site, x, site.shape(x)[1], weight, bias, eps)


def _group_norm_at(site: Site, x: Any, groups: int, weight: Any, bias: Any, eps: float) -> Built:
    jacobian = whole_jacobian(site, x)
    cross = cross_covariance(site, weight, bias, channels_of=len(site.shape(x)))
    return Built(group_norm, (x, groups, weight, bias, eps, jacobian, cross), normalisation_note(jacobian))
