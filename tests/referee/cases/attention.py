"""Attention, fused and in pieces, and softmaxes that are none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from referee.case import case, linear, module, section
from referee.truth import held

SEQUENCE = (3, 4)  # positions and width
MIX = torch.tensor([[0.3, -1.0], [0.8, 0.1], [-0.5, 0.7], [1.2, 0.4]])


def _heads(t: Tensor, heads: int = 2) -> Tensor:
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def _pieces(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return held((scores if mask is None else scores + mask).softmax(-1)) @ v


class _Block(nn.Module):
    """A transformer block, before or after normalisation."""

    def __init__(self, before: bool, fused: bool):
        super().__init__()
        self.before, self.fused = before, fused
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(t) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v) if self.fused else _pieces(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attend(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def _attention(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))


_QKV = {"q": linear(4, 4), "k": linear(4, 4), "v": linear(4, 4)}
ATTENTION = section(
    "Attention",
    case("attention, fused", _attention, x=SEQUENCE, **_QKV),
    case(
        "attention, causal",
        lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), is_causal=True),
        x=SEQUENCE,
        **_QKV,
    ),
    case("attention, in pieces", lambda m, x: _pieces(m.q(x), m.k(x), m.v(x)), x=SEQUENCE, **_QKV),
    case(
        "attention, in pieces, random bias",
        lambda m, x: _pieces(m.q(x), m.k(x), m.v(x), m.b),
        x=SEQUENCE,
        b=(3, 3),
        **_QKV,
    ),
    case(
        "attention, einsum",
        lambda m, x: torch.einsum(
            "bts,bsd->btd", held(torch.einsum("btd,bsd->bts", m.q(x), m.k(x)).softmax(-1)), m.v(x)
        ),
        x=SEQUENCE,
        **_QKV,
    ),
    case(
        "attention, random mask",
        lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), attn_mask=m.b),
        x=SEQUENCE,
        b=(3, 3),
        **_QKV,
    ),
    case(
        "attention, unbatched random value",
        lambda m, x: F.scaled_dot_product_attention(x, x, m.w.expand_as(x)),
        w=(3, 4),
        x=SEQUENCE,
    ),
    case(
        "attention, value of a parameter alone",
        lambda m, x: F.scaled_dot_product_attention(x, x, m.w),
        w=(1, 3, 4),
        x=SEQUENCE,
    ),
    case(
        "attention, learned queries",
        lambda m, x: F.scaled_dot_product_attention(m.w.expand(x.shape[0], -1, -1), m.k(x), m.v(x)),
        w=(1, 2, 4),
        k=linear(4, 4),
        v=linear(4, 4),
        x=SEQUENCE,
    ),
    case(
        "fused projection",
        lambda m, x: F.scaled_dot_product_attention(*m.l(x).chunk(3, -1)),
        l=linear(4, 12),
        x=SEQUENCE,
    ),
    case(
        "fused projection that is an output",
        lambda m, x: (lambda a: (F.scaled_dot_product_attention(*a.chunk(3, -1)), a))(m.l(x)),
        l=linear(4, 12),
        x=SEQUENCE,
    ),
    case(
        "fused projection, read twice",
        lambda m, x: (lambda a: F.scaled_dot_product_attention(*a.chunk(3, -1)) + a[..., :4])(m.l(x)),
        l=linear(4, 12),
        x=SEQUENCE,
    ),
    case(
        "keys that are values",
        lambda m, x: (lambda h: F.scaled_dot_product_attention(m.q(x), h, h))(m.v(x)),
        q=linear(4, 4),
        v=linear(4, 4),
        x=SEQUENCE,
    ),
    case("softmax times a constant matrix", lambda m, x: (x @ m.w).softmax(-1) @ m.c, w=(5, 4), c=MIX),
    case("softmax of a layer times a constant matrix", lambda m, x: m.l(x).softmax(-1) @ m.c, l=linear(), c=MIX),
    case("softmax times a random value", lambda m, x: (x @ m.w).softmax(-1) @ m.c, w=(5, 4), c=(4, 2)),
    case(
        "attention pooling",
        lambda m, x: (m.s(x).softmax(1) * m.v(x)).sum(1),
        s=linear(4, 1),
        v=linear(4, 4),
        x=SEQUENCE,
    ),
    case("linear attention", lambda m, x: F.elu(m.q(x)) @ (F.elu(m.k(x)).mT @ m.v(x)), x=SEQUENCE, **_QKV),
    case(
        "nn.MultiheadAttention",
        lambda m, x: m.a(x, x, x, need_weights=False)[0],
        a=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        x=SEQUENCE,
    ),
    module("nn.TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), SEQUENCE),
    module(
        "nn.TransformerEncoderLayer, norm first",
        lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True),
        SEQUENCE,
    ),
    module("transformer block", lambda: _Block(True, True), SEQUENCE),
    module("transformer block, norm after", lambda: _Block(False, True), SEQUENCE),
    module("transformer block, in pieces", lambda: _Block(True, False), SEQUENCE),
)
