"""What a random layer adds to the covariance of the outputs, given sensitivities `g [K, B, out]` of its result.

For one vector `a` per sample the Jacobian of the weight is `g aᵀ`, so that nothing of its size is needed:

    g Cov(W a + b) gᵀ,    Cov(W a + b) diagonal in a basis that all samples share
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.kronecker import KroneckerPosterior


class Form(nn.Module):
    """A module without hooks: calling it is calling `forward`. Layers read their buffers from the dictionary that holds
    them. PyTorch's own ways are slower by an amount that counts at batch 1.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)


class DiagonalLayer(Form):
    """`g diag(V a² + v) gᵀ`; `g` is None for the identity, at the output itself. A factor multiplies the variances."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: Independent, full: bool):
        super().__init__()
        self.full = full
        self.register_buffer("weight", layer.weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.clone())

    def forward(self, g: Tensor | None, a: Tensor, total: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
        held: dict[str, Any] = self._buffers
        noise = F.linear(a * a, held["weight"], held["bias"])
        if factor is not None:
            noise = noise * factor
        if g is None:
            return added(torch.diag_embed(noise) if self.full else noise, total)
        return weighted(g, noise, self.full, total)


class SameRowsLayer(DiagonalLayer):
    """The same where all samples have one `g`, the rows of the weight behind: its products `g_ko g_lo` are made once.

    They serve all rows; for some of them alone, `identity` says which and `g` holds them.
    """

    products: Tensor

    def __init__(self, layer: DiagonalLayer, rows: Tensor):
        super().__init__(Independent(layer.weight, layer.bias, None), layer.full)
        self.outputs = len(rows)
        products = rows.unsqueeze(1) * rows if self.full else rows * rows
        self.register_buffer("products", products.reshape(-1, rows.shape[-1]).mT.contiguous())

    def forward(
        self,
        g: Tensor | None,
        a: Tensor,
        total: Tensor | None = None,
        factor: Tensor | None = None,
        identity: Tensor | None = None,
    ) -> Tensor:
        if identity is not None:
            return super().forward(g, a, total, factor)
        held: dict[str, Any] = self._buffers
        noise = F.linear(a * a, held["weight"], held["bias"])
        if factor is not None:
            noise = noise * factor
        products = held["products"]
        if not self.full:
            return noise @ products if total is None else torch.addmm(total, noise, products)
        shape = (noise.shape[0], self.outputs, self.outputs)
        if total is None:
            return (noise @ products).reshape(shape)
        return torch.addmm(total.reshape(shape[0], -1), noise, products).reshape(shape)


class KroneckerLayer(Form):
    """`(g Q_B) diag(v (Q_Aᵀ a)² + w) (g Q_B)ᵀ` with variances `v` of the rotated weight and `w` of the rotated bias."""

    left: Tensor
    right: Tensor
    variance: Tensor
    bias: Tensor | None

    def __init__(self, layer: Independent, full: bool):
        super().__init__()
        assert layer.basis is not None
        self.full = full
        self.register_buffer("left", layer.basis[0].clone())
        self.register_buffer("right", layer.basis[1].clone())
        self.register_buffer("variance", layer.weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.clone())

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


@dataclass(frozen=True)
class Independent:
    """A weight and bias in a basis in which their entries are independent; no basis: the one they have."""

    weight: Tensor  # [out, in], variances
    bias: Tensor | None  # [out]; None if it is not random, or independent in another basis
    basis: tuple[Tensor, Tensor] | None


def independent(posterior: Posterior, weight: str, bias: str | None, transposed: bool) -> Independent | None:
    """A layer's weight `[out, in]` (from how it is stored) and bias; None if no such basis is known."""
    if type(posterior) is DiagonalPosterior:
        variance = posterior.variance(weight)
        own = None if bias is None else posterior.variance(bias)
        return Independent(variance.mT if transposed else variance.flatten(1), own, None)
    factors = posterior._factors[weight] if type(posterior) is KroneckerPosterior else None
    if factors is None or factors.right is None:
        return None
    basis, variance = (factors.left, factors.right), factors.variance
    if transposed:
        basis, variance = (factors.right, factors.left), variance.mT
    single = None if bias is None else posterior._factors[bias]  # type: ignore[attr-defined]
    same = single is not None and single.right is None and torch.equal(single.left, basis[0])
    return Independent(variance, single.variance if single is not None and same else None, basis)


def layer_form(layer: Independent, full: bool) -> Form:
    """The form of a layer with one vector per sample."""
    return DiagonalLayer(layer, full) if layer.basis is None else KroneckerLayer(layer, full)
