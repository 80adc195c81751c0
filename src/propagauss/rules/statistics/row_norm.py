"""Layer and RMS normalisation along the last dimensions: `y = w (x - μ) / σ + b`, with `μ`, `σ` taken from the row.

The paper holds the statistics of the mean fixed and keeps the scale: `var = (w/σ)² v`. That leaves out that `μ` and `σ`
move with `x`: the Jacobian is `J = diag(w) (I - 1 1ᵀ/n - x̂ x̂ᵀ/n) / σ` (without the middle term for RMS). The full
structure uses it, and so does the diagonal one with `normalisation="jacobian"`; the difference is of order `1/n`,
unless a few entries dominate the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.precision import mean_in_norm
from propagauss.rules.registry import Built, Site, builder
from propagauss.rules.statistics.affine import Affine, affine, cross_covariance

aten = torch.ops.aten


def row_norm(
    x: Gaussian | Tensor,
    shape: list[int],
    weight: Affine,
    bias: Affine,
    eps: float,
    centred: bool,
    jacobian: bool,
    cross: Tensor | None = None,
) -> Gaussian:
    """Layer norm (`centred`) or RMS norm over the last `len(shape)` dimensions; the affine part may be random."""
    dims = tuple(range(-len(shape), 0))
    m = mean_in_norm(mean_of(x))
    # not torch.native_layer_norm, a little faster: nothing can be differentiated through the scale that it returns
    centred_mean = m - m.mean(dims, keepdim=True) if centred else m
    gain = (centred_mean.square().mean(dims, keepdim=True) + eps).rsqrt()
    unit = centred_mean * gain
    if not isinstance(x, Gaussian):
        return affine(unit, weight, bias, cross)
    return affine(_normalised(x, unit, gain, dims, centred, jacobian), weight, bias, cross)


def _normalised(
    x: Gaussian, unit: Tensor, gain: Tensor, dims: tuple[int, ...], centred: bool, jacobian: bool
) -> Gaussian:
    if not jacobian:
        return x.scaled(unit, gain)

    def linear(t: Tensor) -> Tensor:
        t = t - t.mean(dims, keepdim=True) if centred else t
        return gain * (t - unit * (unit * t).mean(dims, keepdim=True))

    def squared(v: Tensor) -> Tensor:
        """`Σ_i J_ki² v_i`, with `J_ki = (δ_ki - (c + x̂_k x̂_i)/n) / σ` and `c` 1 if centred, else 0."""
        n = torch.Size(v.shape[d] for d in dims).numel()
        c = 1.0 if centred else 0.0
        own = v * (1 - 2 * (c + unit.square()) / n)
        first, second = (unit * v).mean(dims, keepdim=True), (unit.square() * v).mean(dims, keepdim=True)
        shared = (c * v.mean(dims, keepdim=True) + 2 * c * unit * first + unit.square() * second) / n
        return gain.square() * (own + shared).clamp(min=0)

    return x.mapped(unit, linear, squared)


@builder(aten.layer_norm.default, broadcasts=True)
def build_layer_norm(site: Site) -> Built:
    x, shape, weight, bias, eps, *_ = (*site.args, *(None, None, 1e-5)[len(site.args) - 2 :])
    jacobian = whole_jacobian(site, x)
    cross = cross_covariance(site, weight, bias)
    return Built(row_norm, (x, shape, weight, bias, eps, True, jacobian, cross), normalisation_note(jacobian))


@builder(aten.rms_norm.default, broadcasts=True)
def build_rms_norm(site: Site) -> Built:
    args: Any = (*site.args, *(None, None)[len(site.args) - 2 :])
    x, shape, weight, eps = args
    eps = torch.finfo(x.meta["val"].dtype).eps if eps is None else eps
    jacobian = whole_jacobian(site, x)
    return Built(row_norm, (x, shape, weight, None, eps, False, jacobian), normalisation_note(jacobian))


def whole_jacobian(site: Site, x: Any) -> bool:
    """Whether to use it: for a joint covariance, if so chosen, and for a weight, where it costs next to nothing."""
    return site.options.full or site.options.normalisation == "jacobian" or site.is_parameter(x)


def normalisation_note(jacobian: bool) -> str:
    return "linearised through its Jacobian" if jacobian else "scale only: statistics of the mean held fixed"
