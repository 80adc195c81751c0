"""Sampling of feature maps at given places (`grid_sample`): linear in the map, so exact for a certain grid.

`y(place) = Σ_corners w_corner x(corner)` with the products of the distances along each axis as weights, so that
`var = Σ w² v`. That two places read the same corners is lost in the diagonal structure.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.registry import Built, Site, builder, named

aten = torch.ops.aten
BILINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2


@builder(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def build_grid_sampler(site: Site) -> Built | None:
    """An uncertain grid and bicubic interpolation are left to the general rule."""
    given = named(site)
    if site.is_random(given["grid"]) or given["interpolation_mode"] not in (BILINEAR, NEAREST):
        return None
    return Built(grid_sample, tuple(given.values()), "exact (diagonal: places count as independent)")


def grid_sample(x: Gaussian, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Gaussian:
    """`x [B, C, *sizes]`, `grid [B, *places, axes]` with the last axis of the map first."""

    def sample(t: Tensor) -> Tensor:
        return aten.grid_sampler(t, grid, mode, padding, align_corners)

    def sample_rows(t: Tensor) -> Tensor:
        """Rows of a covariance `[r, B, C, *sizes]` are more channels of the same maps."""
        channels = t.movedim(0, 1).flatten(1, 2)
        return sample(channels).unflatten(1, (t.shape[0], t.shape[2])).movedim(1, 0)

    mean = sample(x.mean)
    if x.is_full:
        return x.mapped_rows(mean, sample_rows)
    squares = sample(x.variance) if mode == NEAREST else _bilinear_squared(x.variance, grid, padding, align_corners)
    return Gaussian.diagonal(mean, squares)


def _bilinear_squared(v: Tensor, grid: Tensor, padding: int, align_corners: bool) -> Tensor:
    batch, channels, *sizes = v.shape
    flat = v.flatten(2)
    axes = []
    for axis, size in enumerate(sizes):
        at = _place(grid[..., len(sizes) - 1 - axis], size, padding, align_corners)
        low = at.floor()
        axes.append([(low, low + 1 - at, size), (low + 1, at - low, size)])
    total: Any = 0
    for corner in product(*axes):
        index, weight = torch.zeros_like(grid[..., 0], dtype=torch.long), torch.ones_like(grid[..., 0])
        for position, share, size in corner:
            inside = (position >= 0) & (position <= size - 1)
            index = index * size + position.clamp(0, size - 1).long()
            weight = weight * share * inside
        chosen = flat.gather(2, index.reshape(batch, 1, torch.Size(index.shape[1:]).numel()).expand(-1, channels, -1))
        total = total + chosen.unflatten(2, index.shape[1:]) * weight.square().unsqueeze(1)
    return total


def _place(g: Tensor, size: int, padding: int, align_corners: bool) -> Tensor:
    """A coordinate from -1 to 1 as a (fractional) index along an axis; outside as the padding says."""
    at = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
    if padding == REFLECTION:
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(at)
        beyond = (at - low).abs()
        rest, turns = beyond.fmod(span), (beyond / span).floor()
        at = torch.where(turns % 2 == 0, rest, span - rest) + low
    return at if padding == ZEROS else at.clamp(0, size - 1)
