"""The scale and shift of a normalisation layer: `y = w u + b`, entry by entry, any of the three random.

`u` is independent of the parameters; `w` and `b` of one layer may be correlated, `C_wb = Cov(w, b)`:

    variance:    (w² + V_w) v + u² V_w + 2 u C_wb + V_b
    covariance:  (w wᵀ + V_w) ∘ C + u uᵀ ∘ V_w + diag(u) C_wb + C_wbᵀ diag(u) + V_b

Exact first two moments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, common, mean_of
from propagauss.rules.elementwise.arithmetic import add, multiply
from propagauss.rules.registry import Site

Affine = Gaussian | Tensor | None


def affine(unit: Gaussian | Tensor, weight: Affine, bias: Affine, cross: Tensor | None = None) -> Any:
    """`w u + b`; `cross` is what `cross_covariance` gave. Weight and bias broadcast to `unit`."""
    if common((unit, weight, bias)).joint or not isinstance(weight, Gaussian):
        y: Any = unit
        if isinstance(unit, Gaussian) or isinstance(weight, Gaussian):
            y = y if weight is None else multiply(y, weight)
        elif weight is not None:
            y = unit * weight
        y = y if bias is None else add(y, bias)
        return y if cross is None else _with_cross(y, mean_of(unit), cross)
    u = mean_of(unit)
    mean = u * weight.mean if bias is None else u * weight.mean + mean_of(bias)
    variance = own_variance(u, weight, bias, cross)
    if isinstance(unit, Gaussian):
        variance = torch.addcmul(variance, unit.variance, second_moment(weight))
    return Gaussian.diagonal(mean, variance)


def own_variance(u: Tensor, weight: Gaussian, bias: Affine, cross: Tensor | None) -> Tensor:
    """`u² V_w + 2 u C_wb + V_b`: what random parameters add at a fixed `u`."""
    slope = u * weight.variance if cross is None else u * weight.variance + 2 * cross
    total = torch.addcmul(bias.variance, u, slope) if isinstance(bias, Gaussian) else u * slope
    return total if cross is None else total.clamp(min=0)  # terms that may cancel: rounding


def second_moment(weight: Gaussian) -> Tensor:
    """`E[w²]`"""
    return weight.mean.square() + weight.variance


def _with_cross(y: Gaussian, u: Tensor, cross: Tensor) -> Gaussian:
    """Add `diag(u) C + Cᵀ diag(u)`; `cross` is `[*shape, *shape]` for parameters that broadcast to `u` as `shape`."""
    batch, n, _ = y.covariance.shape
    half = cross.dim() // 2
    places = torch.arange(cross.shape[:half].numel(), device=u.device).reshape(cross.shape[:half])
    places = places.expand(1, *u.shape[1:]).reshape(-1)  # which entry of the parameters belongs to each entry of u
    size = cross.shape[:half].numel()
    wide = cross.reshape(size, size)[places][:, places]
    term = u.reshape(batch, n, 1) * wide
    return Gaussian.full(y.mean, y.covariance + term + term.mT)


def cross_covariance(site: Site, weight: Any, bias: Any, channels_of: int | None = None) -> Tensor | None:
    """`Cov(w, b)` of a layer at a site: entry by entry, or between all entries for the full structure.

    With `channels_of` dimensions in the layer's input, the parameters are lifted from `[C]` to `[1, C, 1, ...]`.
    """
    w, b = (None if p is None else site.weight(p) for p in (weight, bias))
    if w is None or b is None or w.name is None or b.name is None or site.posterior is None:
        return None
    block = site.posterior.between(w.name, b.name)
    if block is None:
        return None
    shape = tuple(w.tensor.shape) if channels_of is None else (1, w.tensor.numel(), *[1] * (channels_of - 2))
    return block.reshape(*shape, *shape) if site.options.full else block.diagonal().reshape(shape)
