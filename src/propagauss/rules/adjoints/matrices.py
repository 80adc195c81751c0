"""Adjoints of sums of products: linear layers, matrix products, attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from propagauss.rules.adjoints.registry import adjoint, prepared, unbroadcast
from propagauss.rules.matrices.attention import attention_weights

aten = torch.ops.aten


@adjoint(aten.linear.default)
def linear(g: Tensor, i: int, y: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """`y = x Wᵀ + b`: `g W`; for a weight without samples `Σ_t g_t x_tᵀ`"""
    if w.dim() == 1:
        return _by_row(linear, g, i, y, x, w)
    if i == 0:
        return g @ w
    lead = g.dim() - y.dim()
    flat = g.reshape(*g.shape[:lead], -1, g.shape[-1])
    return flat.mT @ x.reshape(-1, x.shape[-1]) if i == 1 else flat.sum(-2)


@adjoint(aten.linear.default, per_sample=True)
def linear_per_sample(g: Tensor, i: int, y: Tensor, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """`M_k = Σ_t g_kt x_tᵀ` for the weight, `Σ_t g_kt` for the bias, `t` the positions of a sample."""
    if w.dim() == 1:
        return _by_row(linear_per_sample, g, i, y, x, w)
    g = g.reshape(*g.shape[:2], -1, g.shape[-1])  # [K, B, T, out]
    return g.mT @ x.reshape(x.shape[0], -1, x.shape[-1]) if i == 1 else g.sum(2)


def _by_row(pull: Any, g: Tensor, i: int, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A weight that is a vector, as a matrix of one row."""
    found = pull(g.unsqueeze(-1), i, y.unsqueeze(-1), x, w.unsqueeze(0))
    return found if i == 0 else found.squeeze(-2) if i == 1 else found.squeeze(-1)


@adjoint(aten.addmm.default)
def addmm(
    g: Tensor, i: int, y: Tensor, b: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if i == 0:
        return unbroadcast(g * beta, g.dim() - y.dim(), b.shape)
    return alpha * (g @ w.mT if i == 1 else x.mT @ g)


@adjoint(aten.addmm.default, per_sample=True)
def addmm_per_sample(
    g: Tensor, i: int, y: Tensor, b: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`Σ_t x_t g_ktᵀ` over the rows of a sample, `Σ_t g_kt` for the bias."""
    g = g.reshape(*g.shape[:2], -1, g.shape[-1])  # [K, B, T, out]
    if i == 0:
        return beta * g.sum(2) if b.dim() == 1 else unbroadcast(beta * g, 2, b.shape)
    found = x.reshape(x.shape[0], -1, x.shape[-1]).mT @ g
    return found if alpha == 1 else alpha * found


@adjoint(aten.mm.default, aten.matmul.default, aten.bmm.default)
def matmul(g: Tensor, i: int, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`g Bᵀ` and `Aᵀ g`, with vectors as matrices of one row or column."""
    lead = g.dim() - y.dim()
    if b.dim() == 1:
        g = g.unsqueeze(-1)
    if a.dim() == 1:
        g = g.unsqueeze(-2)
    left, right = (a.unsqueeze(0) if a.dim() == 1 else a), (b.unsqueeze(1) if b.dim() == 1 else b)
    found = g @ right.mT if i == 0 else left.mT @ g
    found = unbroadcast(found, lead, (left if i == 0 else right).shape)
    return found.reshape(*found.shape[:lead], *(a if i == 0 else b).shape)


@adjoint(aten.softmax.int, aten._softmax.default)
def softmax(g: Tensor, i: int, y: Tensor, x: Tensor, dim: int, *rest: Any, **named: Any) -> Tensor:
    """`y (g - Σ g y)`"""
    dim = dim if dim < 0 else dim - y.dim()
    weighted = g * y
    return weighted - y * weighted.sum(dim, keepdim=True)


@adjoint(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(g: Tensor, i: int, y: Tensor, x: Tensor, dim: int, *rest: Any, **named: Any) -> Tensor:
    """`g - softmax(x) Σ g`"""
    dim = dim if dim < 0 else dim - y.dim()
    return g - y.exp() * g.sum(dim, keepdim=True)


@prepared(aten.scaled_dot_product_attention.default)
def weights_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return attention_weights(q, k, mask, is_causal, scale, enable_gqa)


@adjoint(aten.scaled_dot_product_attention.default)
def attention(
    g: Tensor,
    i: int,
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    ready: Tensor,
) -> Tensor:
    """`y = P v`, `P = softmax(s q kᵀ + mask)`, `S = P (g vᵀ - Σ P g vᵀ)`: `s S k`, `s Sᵀ q`, `Pᵀ g`, and `S` itself."""
    lead, heads = g.dim() - y.dim(), k.shape[-3] if k.dim() > 2 else 1
    groups = q.shape[-3] // heads if enable_gqa else 1
    keys, values = (t.repeat_interleave(groups, -3) if groups > 1 else t for t in (k, v))
    s = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    p = ready
    if i == 2:
        found = p.mT @ g
    else:
        back = g @ values.mT
        back = back * p
        back = back - p * back.sum(-1, keepdim=True)
        if i == 3:
            assert mask is not None
            return unbroadcast(back, lead, mask.shape)
        found = s * (back @ keys if i == 0 else back.mT @ q)
    if groups > 1 and i != 0:
        found = found.unflatten(-3, (heads, groups)).sum(-3)
    return unbroadcast(found, lead, (q, k, v)[i].shape)
