"""Scaled dot-product attention: `out = P V`, `P = softmax(Q Kᵀ / √d + mask)`.

As in the paper, queries and keys enter by their mean, so `P` is fixed: `E[out] = P E[V]`, `Var[out] = P² Var[V]` (tokens are
independent in the diagonal structure; the full one keeps their covariance). What is left out is the uncertainty of *where*
to look, `Q` and `K`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
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
    if mask.dtype == torch.bool:
        # a row without any allowed column would be NaN
        return scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0).nan_to_num(0.0)
    return (scores + mask).softmax(-1)


def attention(
    q: Any, k: Any, v: Gaussian, mask: Any = None, is_causal: bool = False, scale: Any = None, grouped: bool = False
) -> Gaussian:
    p = attention_weights(_mean(q), _mean(k), _mean(mask), is_causal, scale, grouped)

    def mix(t: Tensor, weights: Tensor) -> Tensor:
        if grouped:
            t = t.repeat_interleave(p.shape[-3] // t.shape[-3], dim=-3)
        return weights @ t

    return v.mapped(mix(v.mean, p), lambda t: mix(t, p), lambda t: mix(t, p.square()))


def attention_by_mean(
    q: Any, k: Any, v: Tensor, mask: Any, is_causal: bool, scale: Any, grouped: bool
) -> Tensor:
    """The plain op on the means of queries and keys."""
    return torch.nn.functional.scaled_dot_product_attention(
        _mean(q), _mean(k), v, _mean(mask), is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


@builder(aten.scaled_dot_product_attention.default)
def build_attention(site: Site) -> Built:
    defaults = (None, 0.0, False)
    q, k, v, mask, _, causal = (*site.args, *defaults[len(site.args) - 3 :])[:6]
    settings = (mask, causal, site.kwargs.get("scale"), site.kwargs.get("enable_gqa", False))
    scores = " and ".join(n for n, a in (("queries", q), ("keys", k)) if site.is_random(a))
    note = f"{scores} by their mean" if scores else "exact"
    if site.is_random(v):
        return Built(attention, (q, k, v, *settings), note)
    return Built(attention_by_mean, (q, k, v, *settings), note, random=False)


def _mean(x: Any) -> Any:
    return x.mean if isinstance(x, Gaussian) else x
