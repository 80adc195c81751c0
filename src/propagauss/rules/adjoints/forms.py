"""What a random layer adds to the covariance of the outputs, given sensitivities `g [K, B, out]` of its result.

For one vector `a` per sample the Jacobian of the weight is `g aᵀ`, so that nothing of its size is needed:

    g Cov(W a + b) gᵀ,    Cov(W a + b) diagonal in a basis that all samples share
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.kronecker import Eigenfactors, KroneckerPosterior


class Form(nn.Module):
    """A module without hooks: calling it is calling `forward`, and at batch 1 the difference counts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)


class DiagonalLayer(Form):
    """`g diag(V a² + v) gᵀ`; `g` is None for the identity, at the output itself. A slope multiplies `g` beforehand."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, full: bool):
        super().__init__()
        self.full = full
        self.register_buffer("weight", weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if bias is None else bias.clone())

    def forward(self, g: Tensor | None, a: Tensor, total: Tensor | None = None, slope: Tensor | None = None) -> Tensor:
        noise = F.linear(a * a, self.weight, self.bias)
        if slope is not None:
            noise = noise * slope.square()
        if g is None:
            return added(torch.diag_embed(noise) if self.full else noise, total)
        return weighted(g, noise, self.full, total)


class KroneckerLayer(Form):
    """`(g Q_B) diag(v (Q_Aᵀ a)² + w) (g Q_B)ᵀ` with variances `v` of the rotated weight and `w` of the rotated bias."""

    left: Tensor
    right: Tensor
    variance: Tensor
    bias: Tensor | None

    def __init__(self, weight: Eigenfactors, bias: Tensor | None, full: bool):
        super().__init__()
        assert weight.right is not None
        self.full = full
        self.register_buffer("left", weight.left.clone())
        self.register_buffer("right", weight.right.clone())
        self.register_buffer("variance", weight.variance.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if bias is None else bias.clone())

    def forward(self, g: Tensor | None, a: Tensor, total: Tensor | None = None) -> Tensor:
        noise = F.linear((a @ self.right).square(), self.variance, self.bias)
        if g is None:
            return weighted(self.left.unsqueeze(1).expand(-1, a.shape[0], -1), noise, self.full, total)
        return weighted(g @ self.left, noise, self.full, total)


class DiagonalEmbedding(Form):
    """`Σ_ts [i_t = i_s] g_t diag(v_i) g_sᵀ` over the positions of a sample with indices `i`: no row is made twice."""

    variance: Tensor

    def __init__(self, variance: Tensor, full: bool):
        super().__init__()
        self.full = full
        self.register_buffer("variance", variance.clone())

    def forward(self, g: Tensor, index: Tensor) -> Tensor:
        rows = index.reshape(index.shape[0], -1)
        g = g.reshape(*g.shape[:2], -1, g.shape[-1])  # [K, B, T, D]
        same = (rows.unsqueeze(-1) == rows.unsqueeze(-2)).to(g.dtype)  # [B, T, T]
        moved, other = (g * F.embedding(rows, self.variance)).flatten(2), (same @ g).flatten(2)
        if not self.full:
            return (moved * other).sum(-1).mT
        return moved.transpose(0, 1) @ other.permute(1, 2, 0)


def weighted(g: Tensor, variance: Tensor, full: bool, total: Tensor | None = None) -> Tensor:
    """`g diag(v) gᵀ [B, K, K]`, or its diagonal `[B, K]`, for `g [K, B, n]` and `v [B, n]`; added to `total`."""
    moved = g * variance
    if not full:
        return added((moved * g).sum(-1).mT, total)
    left, right = moved.transpose(0, 1), g.permute(1, 2, 0)
    return left @ right if total is None else torch.baddbmm(total, left, right)


def added(form: Tensor, total: Tensor | None) -> Tensor:
    return form if total is None else total + form


def gram(rows: Tensor) -> Tensor:
    """`[K, B, rank] -> [B, K, K]`"""
    return rows.transpose(0, 1) @ rows.permute(1, 2, 0)


def squares(rows: Tensor) -> Tensor:
    """`[K, B, rank] -> [B, K]`"""
    return rows.square().sum(-1).mT


def layer_form(
    posterior: Posterior, weight: str, bias: str | None, transposed: bool, full: bool
) -> tuple[nn.Module, bool] | None:
    """The form of a layer with one vector per sample, and whether it includes the bias; None if there is none."""
    if type(posterior) is DiagonalPosterior:
        variance: Any = posterior.variance(weight)
        variance = variance.t() if transposed else variance
        return DiagonalLayer(variance, None if bias is None else posterior.variance(bias), full), True
    if type(posterior) is KroneckerPosterior:
        factors = posterior._factors[weight]
        if factors.right is None:
            return None
        if transposed:
            factors = Eigenfactors(factors.right, factors.left, factors.variance.mT)
        own = None if bias is None else posterior._factors[bias]
        same = own is not None and own.right is None and torch.equal(own.left, factors.left)
        return KroneckerLayer(factors, own.variance if own is not None and same else None, full), same
    return None
