"""Distances and similarities of vectors, linearised at the mean: exact to first order.

They are bad where two vectors (nearly) meet within a standard deviation: a distance cannot be negative, its
linearisation can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.elementwise.arithmetic import independent_sum, stretched
from propagauss.rules.matrices.products import Value
from propagauss.rules.registry import rule
from propagauss.rules.statistics.reductions import norm_slope, reduced

aten = torch.ops.aten
NOTE = "linearised in each argument, arguments independent"


@rule(aten.cosine_similarity.default, note=NOTE)
def cosine_similarity(x1: Value, x2: Value, dim: int = 1, eps: float = 1e-8) -> Gaussian:
    """`y = â · b̂`, `∂y/∂a = (b̂ - y â) / ‖a‖`; below `eps` a norm is a constant, and `∂y/∂a = b̂ / eps`."""
    mean = torch.cosine_similarity(mean_of(x1), mean_of(x2), dim, eps)
    shape = torch.broadcast_shapes(mean_of(x1).shape, mean_of(x2).shape)
    kept = mean.unsqueeze(dim)
    parts = []
    for own, other in ((x1, x2), (x2, x1)):
        if isinstance(own, Gaussian):
            wide = stretched(own, shape)
            size = wide.mean.norm(dim=dim, keepdim=True)
            length = size.clamp(min=eps)
            partner = mean_of(other) / mean_of(other).norm(dim=dim, keepdim=True).clamp(min=eps)
            turned = torch.where(size > eps, kept * wide.mean / length, 0)
            parts.append(reduced(wide, mean, (partner - turned) / length, [dim]))
    return independent_sum(mean, parts)


@rule(aten.pairwise_distance.default, note=NOTE)
def pairwise_distance(x1: Value, x2: Value, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Gaussian:
    """`‖a - b + ε‖_p` over the last dimension."""
    a, b = mean_of(x1), mean_of(x2)
    mean = torch.pairwise_distance(a, b, p, eps, keepdim)
    apart = a - b + eps
    slope = norm_slope(apart, apart.norm(p, -1, True), p, [-1])
    parts = [stretched(x, apart.shape) for x in (x1, x2) if isinstance(x, Gaussian)]
    return independent_sum(mean, [reduced(x, mean, slope, [-1], keepdim) for x in parts])


@rule(aten.cdist.default, aten._cdist_forward.default, note=NOTE)
def cdist(x1: Value, x2: Value, p: float = 2.0, compute_mode: int | None = None) -> Gaussian:
    """`y_pr = ‖a_p - b_r‖`, `∂y_pr/∂a_p = -∂y_pr/∂b_r = g_pr`; holds all `g`, `[..., P, R, features]`."""
    a, b = mean_of(x1), mean_of(x2)
    mean = aten.cdist(a, b, p, compute_mode)
    apart = a.unsqueeze(-2) - b.unsqueeze(-3)
    slope = norm_slope(apart, torch.linalg.vector_norm(apart, p, -1, True), p, [-1])

    def through(coefficients: Tensor, t: Tensor, axis: int) -> Tensor:
        return (coefficients * t.unsqueeze(axis)).sum(-1)

    parts = []
    for x, axis in ((x1, -2), (x2, -3)):
        if isinstance(x, Gaussian):
            parts.append(
                x.mapped(
                    mean,
                    lambda t, axis=axis: through(slope, t, axis),
                    lambda v, axis=axis: through(slope.square(), v, axis),
                )
            )
    return independent_sum(mean, parts)


@rule(aten.affine_grid_generator.default, note="exact (diagonal: places count as independent)")
def affine_grid(theta: Gaussian, size: list[int], align_corners: bool) -> Gaussian:
    """`grid_i(place) = Σ_j θ_ij base_j(place)`, with the places themselves and a 1 as base."""
    n = len(size) - 2
    unit = torch.eye(n, n + 1, dtype=theta.dtype, device=theta.device).unsqueeze(0)
    base = aten.affine_grid_generator(unit, [1, *size[1:]], align_corners)  # [1, *places, n]
    base = torch.cat([base, torch.ones_like(base[..., :1])], -1)[0]

    def through(t: Tensor, coefficients: Tensor) -> Tensor:
        rows = coefficients.reshape(-1, n + 1) @ t.mT  # [B, places, n]
        return rows.reshape(t.shape[0], *coefficients.shape[:-1], n)

    mean: Any = aten.affine_grid_generator(theta.mean, size, align_corners)
    return theta.mapped(mean, lambda t: through(t, base), lambda v: through(v, base.square()))
