"""`F.multi_head_attention_forward` with the batch in front.

PyTorch's own code works on `[T, B, E]`, also for `nn.MultiheadAttention(batch_first=True)`: samples then lie between
positions and features, where a joint covariance per sample cannot follow. This computes the same on `[B, T, E]`:

    softmax(Q Kᵀ / √d + mask) V  per head, then the output projection
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def batch_first_attention(sources: dict[int, Tensor], *args: Any, **kwargs: Any) -> Any:
    """The result of the call, or None if it is not a plain one on values that were made by moving the batch back.

    `sources` maps the id of a tensor `[T, B, E]` to the `[B, T, E]` that it is a transpose of.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    moved = [sources.get(id(call[name])) for name in ("query", "key", "value")]
    q, k, v = moved
    if q is None or k is None or v is None or not (_is_plain(call) and _mask_fits(call, q, k)):
        return None
    heads, need_weights = call["num_heads"], call["need_weights"]
    batch, targets, width = q.shape
    mask = _mask(call, q, k)
    causal = call["is_causal"] and call["key_padding_mask"] is None and not need_weights
    q, k, v = (_by_head(x, heads) for x in _projected(call, q, k, v))
    weights = None
    if need_weights:
        scores = (q * (1.0 / float(q.shape[-1]) ** 0.5)) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        mixed = weights @ v
        weights = weights.mean(1) if call["average_attn_weights"] else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, None if causal else mask, 0.0, causal)
    out = mixed.transpose(1, 2).reshape(batch, targets, width)
    return F.linear(out, call["out_proj_weight"], call["out_proj_bias"]).transpose(0, 1), weights


def _is_plain(call: dict[str, Any]) -> bool:
    extras = ("bias_k", "bias_v", "static_k", "static_v")
    in_training = call["training"] and call["dropout_p"] > 0
    return all(call[name] is None for name in extras) and not call["add_zero_attn"] and not in_training


def _mask_fits(call: dict[str, Any], q: Tensor, k: Tensor) -> bool:
    """Otherwise PyTorch's own code says what is wrong; here a mask of another shape might be broadcast."""
    mask, batch = call["attn_mask"], q.shape[0]
    if mask is None:
        return not call["is_causal"]
    sizes = (q.shape[1], k.shape[1])
    return mask.shape == (sizes if mask.dim() == 2 else (batch * call["num_heads"], *sizes))


def _projected(call: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values; one product where all are made of the same value."""
    weight, bias = call["in_proj_weight"], call["in_proj_bias"]
    if call["use_separate_proj_weight"]:
        weights = [call[f"{name}_proj_weight"] for name in "qkv"]
    elif q is k and k is v:
        return F.linear(q, weight, bias).chunk(3, -1)
    elif k is v:
        (wq, wkv), width = weight.split([q.shape[-1], 2 * q.shape[-1]]), q.shape[-1]
        bq, bkv = (None, None) if bias is None else bias.split([width, 2 * width])
        return F.linear(q, wq, bq), *F.linear(k, wkv, bkv).chunk(2, -1)
    else:
        weights = weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))


def _by_head(x: Tensor, heads: int) -> Tensor:
    """`[B, T, heads * d]` as `[B, heads, T, d]`."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _mask(call: dict[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks together, to be added to the scores `[B, heads, T, S]`; booleans say what is left out."""
    heads, batch = call["num_heads"], q.shape[0]
    mask, padding = call["attn_mask"], call["key_padding_mask"]
    mask, padding = _additive(mask, q), _additive(padding, q)
    if mask is not None and mask.dim() == 3:
        mask = mask.reshape(batch, heads, q.shape[1], k.shape[1])
    if padding is not None:
        padding = padding.reshape(batch, 1, 1, k.shape[1])
        mask = padding if mask is None else mask + padding
    return mask


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return like.new_zeros(mask.shape).masked_fill(mask, float("-inf"))
