"""Scaled dot-product attention: `out = P V`, `P = softmax(Q Kᵀ / √d + mask)`.

As in the paper, queries and keys are fixed at their means, so `P` is fixed and `E[out] = P E[V]`,
`Var[out] = P² Var[V]`. Tokens are independent in the diagonal structure; the full one keeps their covariance. What is
left out is the uncertainty of *where* to look, `Q` and `K`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.facts import state
from propagauss.rules.matrices.linear import StoredLayer, linear_layer, read_layer
from propagauss.rules.precision import in_full_precision
from propagauss.rules.registry import Built, Site, builder

aten = torch.ops.aten


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """`softmax(Q Kᵀ scale + mask)`: `[..., T, S]`; rows that are masked out wholly are zero."""
    if grouped:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT
    if is_causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if mask is None:
        return scores.softmax(-1)
    # all on the mask, which is most often the same for all heads, rather than on the scores
    closed = ~mask if mask.dtype == torch.bool else mask.isneginf()
    nowhere = closed.all(-1, keepdim=True)  # a row without any allowed column would be NaN
    offset = torch.zeros_like(mask, dtype=q.dtype) if mask.dtype == torch.bool else mask.masked_fill(nowhere, 0.0)
    offset = offset.masked_fill(closed & ~nowhere, -torch.inf)
    return (scores + offset).softmax(-1) * (~nowhere).to(q.dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Gaussian,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    grouped: bool = False,
) -> Gaussian:
    p = attention_weights(mean_of(q), mean_of(k), mean_of(mask), is_causal, scale, grouped)

    def variance(t: Tensor) -> Tensor:
        return in_full_precision(lambda s, weights: _mix(s, weights.square(), grouped), t, p)

    return v.mapped(_mix(v.mean, p, grouped), lambda t: _mix(t, p, grouped), variance)


def _mix(t: Tensor, weights: Tensor, grouped: bool) -> Tensor:
    if grouped:
        t = t.repeat_interleave(weights.shape[-3] // t.shape[-3], dim=-3)
    return weights @ t


def written_out(
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
    """The fused op, in ops that can be differentiated as often as one likes."""
    return _mix(v, attention_weights(q, k, mask, is_causal, scale, enable_gqa), enable_gqa)


state(written_out, linear_in=(2,))


@builder(aten.scaled_dot_product_attention.default, at_mean=(0, 1, 3), in_pieces=written_out)
def build_attention(site: Site) -> Built:
    defaults = (None, 0.0, False)
    q, k, v, mask, _, causal = (*site.args, *defaults[len(site.args) - 3 :])[:6]
    settings = (mask, causal, site.kwargs.get("scale"), site.kwargs.get("enable_gqa", False))
    return Built(attention, (q, k, v, *settings), "queries and keys fixed at their means")


def linear_after_attention(
    x: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool, *what_its_rule_needs: object
) -> Tensor:
    """An output projection of attention, as value_covariance.py puts it into graphs; here, of means alone."""
    return F.linear(x, weight.mT if flipped else weight, bias)


state(linear_after_attention, at_mean=(12, 13, 14))


class OutputProjection(nn.Module):
    """`Var[y_i] = Σ_j (W_O^j F^j)² (P_j² s)_i + (W_O^j)² (P_j² d)_i`, plus what a random `W_O` adds."""

    product: Tensor  # [heads * in, out]
    squared_t: Tensor  # [heads * d, out], rows in the order of the heads
    weight: Tensor
    bias: Tensor | None
    rows: Tensor  # of the value layer, by head: [heads * d]
    marginal_t: Tensor | None  # variances of the output weight: [in, out]
    value_marginal_t: Tensor | None  # variances of the value weight: [in, out]

    def __init__(
        self, output: StoredLayer, columns: list[int], values: StoredLayer, rows: Tensor, by_time: tuple[bool, bool]
    ):
        """`by_time`: whether the input of the output layer, and that of the value layer, have time before batch."""
        super().__init__()
        self.output_by_time, self.values_by_time = by_time
        heads, d = rows.shape
        by_head = output.matrix[:, torch.tensor(columns).argsort()].reshape(-1, heads, d)  # [out, heads, d]
        factors = values.matrix[rows]  # [heads, d, in]
        product = torch.einsum("ohd,hdi->hio", by_head, factors).square()
        self.register_buffer("product", product.flatten(0, 1).contiguous())
        self.register_buffer("squared_t", by_head.square().flatten(1).t())
        self.register_buffer("weight", output.matrix)
        self.register_buffer("bias", output.bias)
        self.register_buffer("rows", rows.flatten())
        self.noise, self.value_noise = output.noise, values.noise
        marginal = None if self.noise is None else self.noise.weight_variance()
        self.register_buffer("marginal_t", None if marginal is None else marginal.t())
        value = None if self.value_noise is None else self.value_noise.weight_variance()
        self.register_buffer("value_marginal_t", None if value is None else value.t())
        self.heads, self.d = heads, d

    def forward(self, x: Gaussian, h: Gaussian | Tensor, q: Tensor, k: Tensor | None, *settings: Any) -> Gaussian:
        p = mean_of(q) if k is None else attention_weights(mean_of(q), mean_of(k), *settings)
        squared = (p if p.dim() == 4 else p.unflatten(0, (-1, self.heads))).square()  # [B, H, T, S]
        batch, heads, rows, tokens = squared.shape
        mean = F.linear(x.mean, self.weight, self.bias)
        own = self._own_variance(h)
        variance = mean.new_zeros((batch, rows, mean.shape[-1]))
        if isinstance(h, Gaussian):
            s = self._tokens(h.variance, batch, tokens).unsqueeze(1)
            mixed = (squared @ s).transpose(1, 2).reshape(batch, rows, -1)  # [B, T, H * in]
            variance = variance + mixed @ self.product
        if own is not None:
            noise = self._tokens(own, batch, tokens)[..., self.rows].unflatten(-1, (heads, self.d)).transpose(1, 2)
            variance = variance + (squared @ noise).transpose(1, 2).reshape(batch, rows, -1) @ self.squared_t
        variance = (variance.transpose(0, 1) if self.output_by_time else variance).reshape(mean.shape)
        if self.noise is not None:
            variance = variance + self.noise.variance(x.mean)
            if self.marginal_t is not None:
                variance = variance + x.variance @ self.marginal_t
        return Gaussian.diagonal(mean, variance)

    def _tokens(self, values: Tensor, batch: int, tokens: int) -> Tensor:
        """`[B, T, n]`"""
        if self.values_by_time:
            return values.reshape(tokens, batch, -1).transpose(0, 1)
        return values.reshape(batch, tokens, -1)

    def _own_variance(self, h: Gaussian | Tensor) -> Tensor | None:
        """What random value weights add to each value: `noise(m) + v Vᵀ`."""
        if self.value_noise is None:
            return None
        own = self.value_noise.variance(h.mean if isinstance(h, Gaussian) else h)
        if isinstance(h, Gaussian) and self.value_marginal_t is not None:
            own = own + h.variance @ self.value_marginal_t
        return own


@builder(linear_after_attention)
def build_output_projection(site: Site) -> Built:
    x, w_o, b_o, flipped_o, columns, by_time_o, h, w_v, b_v, flipped_v, rows, by_time_v, q, k, *settings = site.args
    output, values = read_layer(site, w_o, b_o, flipped_o), read_layer(site, w_v, b_v, flipped_v)
    if output is None or values is None or not site.is_random(x):
        built = linear_layer(site, x, w_o, b_o, flipped_o)
        assert built is not None
        return built
    heads = len(rows) if k is None else site.shape(q)[-3]
    per_head = torch.tensor(rows).repeat_interleave(heads // len(rows), dim=0)  # grouped queries share values
    module = OutputProjection(output, columns, values, per_head, (by_time_o, by_time_v))
    return Built(module, (x, h, q, k, *settings), "covariance of values within a head kept; heads independent")
