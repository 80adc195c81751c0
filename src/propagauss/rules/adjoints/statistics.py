"""Adjoints of sums, means, norms and normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from propagauss.rules.adjoints.registry import adjoint

aten = torch.ops.aten
BLOCK_ENTRIES = 2**18  # of sensitivities, from which on they are taken output by output to stay in the cache


def _dims(dim: Any, rank: int) -> list[int]:
    """Reduced dimensions, counted from the end; all of them if none is named."""
    dims = [dim] if isinstance(dim, int) else dim
    return [d if d < 0 else d - rank for d in (dims or range(rank))]


def _widened(g: Tensor, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    if not keepdim:
        for d in sorted(dims, reverse=True):
            g = g.unsqueeze(d)
    return g.expand(*g.shape[: g.dim() - x.dim()], *x.shape)


@adjoint(aten.sum.dim_IntList)
def summed(g: Tensor, i: int, y: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    return _widened(g, x, _dims(dim, x.dim()), keepdim)


@adjoint(aten.mean.dim)
def averaged(g: Tensor, i: int, y: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False, **named: Any) -> Tensor:
    dims = _dims(dim, x.dim())
    count = 1
    for d in dims:
        count = count * x.shape[d]
    return _widened(g / count, x, dims, keepdim)


def _normalised(x: Tensor, shape: Any, eps: float) -> tuple[Tensor, Tensor, list[int]]:
    dims = list(range(-len(shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    scale = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return centred * scale, scale, dims


@adjoint(aten.layer_norm.default)
def layer_norm(
    g: Tensor, i: int, y: Tensor, x: Tensor, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, *rest: Any
) -> Tensor:
    """`z = (x - m) r`: `r (h - mean h - z mean(h z))`, `h = g w`"""
    z, scale, dims = _normalised(x, shape, eps)
    if i == 0:
        h = g if w is None else g * w
        return scale * (h - h.mean(dims, keepdim=True) - z * (h * z).mean(dims, keepdim=True))
    over = list(range(g.dim() - y.dim(), g.dim() - len(shape)))
    return _sum(g * z if i == 2 else g, over)


@adjoint(aten.layer_norm.default, per_sample=True)
def layer_norm_per_sample(
    g: Tensor, i: int, y: Tensor, x: Tensor, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, *rest: Any
) -> Tensor:
    z = _normalised(x, shape, eps)[0]
    return _sum(g * z if i == 2 else g, list(range(2, g.dim() - len(shape))))


@adjoint(aten.group_norm.default)
def group_norm(
    g: Tensor, i: int, y: Tensor, x: Tensor, groups: int, w: Any = None, b: Any = None, eps: float = 1e-5, *rest: Any
) -> Tensor:
    """As `layer_norm`, over the channels of a group and all places."""
    z, scale = _by_group(x, groups, eps)
    if i == 0:
        h = g if w is None else g * w.reshape(-1, *[1] * (x.dim() - 2))
        h = h.reshape(*g.shape[: g.dim() - y.dim()], *z.shape)
        found = scale * (h - h.mean(-1, keepdim=True) - z * (h * z).mean(-1, keepdim=True))
        return found.reshape(g.shape)
    over = [d for d in range(g.dim() - y.dim(), g.dim()) if d != g.dim() - y.dim() + 1]
    return (g * z.reshape(x.shape) if i == 2 else g).sum(over)


@adjoint(aten.group_norm.default, per_sample=True)
def group_norm_per_sample(
    g: Tensor, i: int, y: Tensor, x: Tensor, groups: int, w: Any = None, b: Any = None, eps: float = 1e-5, *rest: Any
) -> Tensor:
    z = _by_group(x, groups, eps)[0].reshape(x.shape)
    return _sum(g * z if i == 2 else g, list(range(3, g.dim())))


def _by_group(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """`z` and `r`: `[B, groups, entries]`, `[B, groups, 1]`"""
    rows = x.reshape(x.shape[0], groups, -1)
    centred = rows - rows.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * scale, scale


@adjoint(aten._weight_norm.default)
def weight_norm(g: Tensor, i: int, y: Tensor, v: Tensor, length: Tensor, dim: int = 0) -> Tensor:
    """`y = l v / |v|`: `(l/|v|) (g - v (v·g)/|v|²)` and `(v·g)/|v|`, for each entry along the dimension."""
    dims = [d for d in range(-v.dim(), 0) if dim < 0 or d != dim - v.dim()]
    norm = v.square().sum(dims, keepdim=True).sqrt()
    along = (v * g).sum(dims, keepdim=True) / norm
    found = along if i == 1 else (length / norm) * (g - (v / norm) * along)
    return found.reshape(*g.shape[: g.dim() - y.dim()], *(length if i == 1 else v).shape)


def _sum(t: Tensor, dims: list[int]) -> Tensor:
    return t.sum(dims) if dims else t


@adjoint(aten.rms_norm.default)
def rms_norm(g: Tensor, i: int, y: Tensor, x: Tensor, shape: Any, w: Any = None, eps: float | None = None) -> Tensor:
    """`z = x r`: `r (h - z mean(h z))`, `h = g w`"""
    z, scale, dims = _rms(x, shape, eps)
    if i == 0:
        h = g if w is None else g * w
        return scale * (h - z * (h * z).mean(dims, keepdim=True))
    return _sum(g * z, list(range(g.dim() - y.dim(), g.dim() - len(shape))))


@adjoint(aten.rms_norm.default, per_sample=True)
def rms_norm_per_sample(
    g: Tensor, i: int, y: Tensor, x: Tensor, shape: Any, w: Any = None, eps: float | None = None
) -> Tensor:
    return _sum(g * _rms(x, shape, eps)[0], list(range(2, g.dim() - len(shape))))


def _rms(x: Tensor, shape: Any, eps: float | None) -> tuple[Tensor, Tensor, list[int]]:
    dims = list(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return x * scale, scale, dims


@adjoint(aten.batch_norm.default)
def batch_norm(
    g: Tensor, i: int, y: Tensor, x: Tensor, w: Any, b: Any, mean: Tensor, var: Tensor, training: bool, m: float,
    eps: float, cudnn: bool,
) -> Tensor:  # fmt: skip
    """In evaluation mode: `y = (x - mean) w / √(var + eps) + b`, per channel."""
    lead, inner = g.dim() - y.dim(), [1] * (y.dim() - 2)
    if i == 0:
        return g * channel_scale(w, var, eps).reshape(-1, *inner)
    return _channels(g, x, mean, (var + eps).rsqrt(), i, lead, lead + 1)


def channel_scale(w: Tensor | None, var: Tensor, eps: float) -> Tensor:
    scale = (var + eps).rsqrt()
    return scale if w is None else scale * w


@adjoint(aten.batch_norm.default, per_sample=True)
def batch_norm_per_sample(
    g: Tensor, i: int, y: Tensor, x: Tensor, w: Any, b: Any, mean: Tensor, var: Tensor, training: bool, m: float,
    eps: float, cudnn: bool,
) -> Tensor:  # fmt: skip
    return _channels(g, x, mean, (var + eps).rsqrt(), i, 2, 2)


def _channels(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, i: int, first: int, channel: int) -> Tensor:
    """Sensitivities of scale (1) and shift (2), summed over all but the channels from dimension `first` on."""
    inner = [1] * (x.dim() - 2)
    over = [d for d in range(first, g.dim()) if d != channel]
    if i == 2:
        return _sum(g, over)
    z = (x - mean.reshape(-1, *inner)) * scale.reshape(-1, *inner)
    if torch.compiler.is_compiling() or g.numel() < BLOCK_ENTRIES or first != 2:
        return _sum(g * z, over)
    return torch.stack([_sum(row * z, [d - 1 for d in over]) for row in g])
