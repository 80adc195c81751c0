"""What models do with ops: attention, residual blocks, gates, detach, aliases, mixtures of experts, loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from referee.case import Case, case, linear, module, normal
from referee.layers import _in
from referee.truth import held, stop

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
ATTENTION = _in(
    "Attention",
    case("attention, fused", _attention, x=SEQUENCE, **_QKV),
    case("attention, causal", lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), is_causal=True), x=SEQUENCE, **_QKV),
    case("attention, in pieces", lambda m, x: _pieces(m.q(x), m.k(x), m.v(x)), x=SEQUENCE, **_QKV),
    case("attention, in pieces, random bias", lambda m, x: _pieces(m.q(x), m.k(x), m.v(x), m.b), x=SEQUENCE, b=(3, 3), **_QKV),
    case("attention, einsum", lambda m, x: torch.einsum("bts,bsd->btd", held(torch.einsum("btd,bsd->bts", m.q(x), m.k(x)).softmax(-1)), m.v(x)), x=SEQUENCE, **_QKV),
    case("attention, random mask", lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), attn_mask=m.b), x=SEQUENCE, b=(3, 3), **_QKV),
    case("attention, unbatched random value", lambda m, x: F.scaled_dot_product_attention(x, x, m.w.expand_as(x)), w=(3, 4), x=SEQUENCE),
    case("attention, value of a parameter alone", lambda m, x: F.scaled_dot_product_attention(x, x, m.w), w=(1, 3, 4), x=SEQUENCE),
    case("attention, learned queries", lambda m, x: F.scaled_dot_product_attention(m.w.expand(x.shape[0], -1, -1), m.k(x), m.v(x)), w=(1, 2, 4), k=linear(4, 4), v=linear(4, 4), x=SEQUENCE),
    case("fused projection", lambda m, x: F.scaled_dot_product_attention(*m.l(x).chunk(3, -1)), l=linear(4, 12), x=SEQUENCE),
    case("fused projection that is an output", lambda m, x: (lambda a: (F.scaled_dot_product_attention(*a.chunk(3, -1)), a))(m.l(x)), l=linear(4, 12), x=SEQUENCE),
    case("fused projection, read twice", lambda m, x: (lambda a: F.scaled_dot_product_attention(*a.chunk(3, -1)) + a[..., :4])(m.l(x)), l=linear(4, 12), x=SEQUENCE),
    case("keys that are values", lambda m, x: (lambda h: F.scaled_dot_product_attention(m.q(x), h, h))(m.v(x)), q=linear(4, 4), v=linear(4, 4), x=SEQUENCE),
    case("softmax times a constant matrix", lambda m, x: (x @ m.w).softmax(-1) @ m.c, w=(5, 4), c=MIX),
    case("softmax of a layer times a constant matrix", lambda m, x: m.l(x).softmax(-1) @ m.c, l=linear(), c=MIX),
    case("softmax times a random value", lambda m, x: (x @ m.w).softmax(-1) @ m.c, w=(5, 4), c=(4, 2)),
    case("attention pooling", lambda m, x: (m.s(x).softmax(1) * m.v(x)).sum(1), s=linear(4, 1), v=linear(4, 4), x=SEQUENCE),
    case("linear attention", lambda m, x: F.elu(m.q(x)) @ (F.elu(m.k(x)).mT @ m.v(x)), x=SEQUENCE, **_QKV),
    case("nn.MultiheadAttention", lambda m, x: m.a(x, x, x, need_weights=False)[0], a=lambda: nn.MultiheadAttention(4, 2, batch_first=True), x=SEQUENCE),
    module("nn.TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), SEQUENCE),
    module("nn.TransformerEncoderLayer, norm first", lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True), SEQUENCE),
    module("transformer block", lambda: _Block(True, True), SEQUENCE),
    module("transformer block, norm after", lambda: _Block(False, True), SEQUENCE),
    module("transformer block, in pieces", lambda: _Block(True, False), SEQUENCE),
)


def _residual(kappa: float) -> Case:
    return case(f"h + {kappa} Linear(h)", lambda m, x: (lambda h: h + kappa * m.k(h))(m.l(x)), l=linear(5, 4), k=linear(4, 4))


def _deep(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    for layer in (m.a, m.b, m.c):
        h = h + layer(h.tanh())
    return h


def _dense(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    for layer in (m.a, m.b):
        h = torch.cat([h, layer(h).relu()], -1)
    return m.c(h)


JOINS = _in(
    "Residual, dense and gated blocks",
    _residual(-0.9),
    _residual(1.0),
    case("h + f(h), fixed branch", lambda m, x: (lambda h: h + m.k(h).relu())(m.l(x)), l=linear(), k=linear(4, 4), random=("l.weight",)),
    case("h * Linear(h)", lambda m, x: (lambda h: h * m.k(h))(m.l(x)), l=linear(), k=linear(4, 4)),
    case("cat of h and Linear(h), summed", lambda m, x: (lambda h: torch.cat([h, m.k(h)], -1).sum(-1))(m.l(x)), l=linear(), k=linear(4, 4)),
    case("three residual blocks", _deep, l=linear(), a=linear(4, 4), b=linear(4, 4), c=linear(4, 4)),
    case("residual blocks, one shared layer", lambda m, x: (lambda h: h + m.a(h + m.a(h).tanh()).tanh())(m.l(x)), l=linear(), a=linear(4, 4), shared=True),
    case("dense connections", _dense, l=linear(), a=linear(4, 3), b=linear(7, 2), c=linear(9, 2)),
    case("convolutional residual block", lambda m, x: (lambda h: h + m.b(m.a(h).relu()))(m.s(x)), s=lambda: nn.Conv1d(2, 2, 1), a=lambda: nn.Conv1d(2, 3, 3, padding=1), b=lambda: nn.Conv1d(3, 2, 3, padding=1), x=(2, 3)),
    case("highway", lambda m, x: (lambda h, t: t * m.k(h).tanh() + (1 - t) * h)(m.l(x), torch.sigmoid(m.t(x))), l=linear(), k=linear(4, 4), t=linear()),
    case("layer scale", lambda m, x: (lambda h: h + m.g * m.k(h))(m.l(x)), l=linear(), k=linear(4, 4), g=(4,)),
    case("nn.GLU", lambda m, x: F.glu(m.l(x), -1), l=linear(5, 8)),
    case("GLU in pieces", lambda m, x: (lambda a, b: a * b.sigmoid())(*m.l(x).chunk(2, -1)), l=linear(5, 8)),
    case("SwiGLU", lambda m, x: m.d(F.silu(m.g(x)) * m.u(x)), g=linear(), u=linear(), d=linear(4, 3)),
    case("SwiGLU of a random value", lambda m, x: (lambda h: m.d(F.silu(m.g(h)) * m.u(h)))(m.l(x)), l=linear(), g=linear(4, 3), u=linear(4, 3), d=linear(3, 2)),
    case("squeeze and excitation", lambda m, x: (lambda h: h * m.e(h.mean(-1)).sigmoid()[..., None])(m.c(x)), c=lambda: nn.Conv1d(2, 3, 1), e=linear(3, 3), x=(2, 4)),
    case("two inputs", lambda m, a, b: m.l(a) * m.k(b), l=linear(5, 3), k=linear(4, 3), x=normal((5,), (4,))),
    case("two outputs", lambda m, x: (lambda h: (h, m.k(h)))(m.l(x)), l=linear(), k=linear(4, 2)),
    case("one value as both outputs", lambda m, x: (lambda h: (h, h))(m.l(x)), l=linear()),
    case("a fixed output beside a random one", lambda m, x: (m.l(x), x.sum(-1)), l=linear()),
    case("h + h", lambda m, x: (lambda h: h + h)(m.l(x)), l=linear()),
    case("h - h.mean()", lambda m, x: (lambda h: h - h.mean(-1, keepdim=True))(m.l(x)), l=linear()),
    case("ensemble of layers, averaged", lambda m, x: (m.a(x) + m.b(x) + m.c(x)) / 3, a=linear(), b=linear(), c=linear()),
    case("neural ODE, four steps", lambda m, x: _ode(m, m.l(x)), l=linear(), f=linear(4, 4), shared=True),
    case("mixture of experts, all", lambda m, x: (lambda g: g[:, :1] * m.a(x) + g[:, 1:] * m.b(x))(m.r(x).softmax(-1)), r=linear(5, 2), a=linear(), b=linear()),
    case("mixture of experts, top 1", lambda m, x: _top1(m, x), r=linear(5, 2), a=linear(), b=linear()),
    case("mixture of experts, stacked weights", lambda m, x: torch.einsum("bi,eoi,be->bo", x, m.w, m.r(x).softmax(-1)), r=linear(5, 3), w=(3, 4, 5)),
    case("selective scan", lambda m, x: _scan(m, x), d=linear(4, 4), b=linear(4, 2), c=linear(4, 2), a=(4, 2), x=SEQUENCE),
    case("token shift", lambda m, x: (lambda h: m.w * h + (1 - m.w) * F.pad(h, (0, 0, 1, -1)))(m.l(x)), l=linear(4, 4), w=(4,), x=SEQUENCE),
    case("relative position bias", lambda m, x: m.l(x) + m.t[:, torch.arange(3)[:, None] - torch.arange(3) + 2].sum(0)[..., :1], l=linear(4, 4), t=(2, 5), x=SEQUENCE),
    case("PReLU", lambda m, x: m.p(m.l(x)), l=linear(), p=lambda: nn.PReLU(4)),
    case("Swish with a random slope", lambda m, x: (lambda h: h * torch.sigmoid(m.b * h))(m.l(x)), l=linear(), b=(4,)),
    case("Snake", lambda m, x: (lambda h: h + (m.a * h).sin().square() / m.a)(m.l(x)), l=linear(), a=(4,)),
)


def _ode(m: Any, h: Tensor) -> Tensor:
    for _ in range(4):
        h = h + 0.25 * m.f(h).tanh()
    return h


def _top1(m: Any, x: Tensor) -> Tensor:
    weight, index = m.r(x).softmax(-1).topk(1, -1)
    both = torch.stack([m.a(x), m.b(x)], 1)
    return weight * both.gather(1, index[..., None].expand(-1, -1, 4))[:, 0]


def _scan(m: Any, x: Tensor) -> Tensor:
    """A state-space layer whose step depends on the input, as in Mamba."""
    step, b, c = F.softplus(m.d(x)), m.b(x), m.c(x)
    state, found = torch.zeros(x.shape[0], 4, 2, dtype=x.dtype), []
    for t in range(x.shape[1]):
        decay = torch.exp(-step[:, t, :, None] * m.a.exp())
        state = decay * state + step[:, t, :, None] * b[:, t, None, :] * x[:, t, :, None]
        found.append((state * c[:, t, None, :]).sum(-1))
    return torch.stack(found, 1)


def _inplace(kind: str) -> Any:
    """`y` may be `h` itself: an op in place on it changes both."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.l(x)
        y = {
            "dropout": lambda: F.dropout(h, 0.5, False),
            "contiguous": lambda: h.contiguous(),
            "to": lambda: h.to(h.dtype),
            "reshape": lambda: h.reshape(-1, 4),
            "view": lambda: h.view(-1, 4),
            "expand": lambda: h.expand(-1, 4),
            "h[:]": lambda: h[:],
            "slice": lambda: h[:, :2],
            "clone": lambda: h.clone(),
            "detach": lambda: stop(h),
        }[kind]()
        y.relu_()
        return y.sum(-1, keepdim=True) + h

    return run


class _Skip(nn.Module):
    """`nn.ReLU(inplace=True)` after dropout, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.branch = nn.Linear(5, 4), nn.Sequential(nn.Dropout(0.5), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        return self.branch(h) + h


ALIASES = _in(
    "Detach, aliases and ops in place",
    *(case(f"{kind}, then relu_, and a skip", _inplace(kind), l=linear()) for kind in ("dropout", "contiguous", "to", "reshape", "view", "expand", "h[:]", "slice", "clone", "detach")),
    module("nn.Dropout, nn.ReLU(inplace=True), skip", _Skip),
    case("h * h.detach()", lambda m, x: (lambda h: h * stop(h))(m.l(x)), l=linear()),
    case("straight-through sign", lambda m, x: (lambda h: h + stop(h.tanh() - h))(m.l(x)), l=linear()),
    case("straight-through rounding", lambda m, x: (lambda h: h + stop(h.round() - h))(m.l(x)), l=linear()),
    case("detached branch", lambda m, x: (lambda h: h + m.k(stop(h)))(m.l(x)), l=linear(), k=linear(4, 4)),
    case("detached output", lambda m, x: stop(m.l(x)), l=linear()),
    case("detached maximum in a softmax", lambda m, x: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(m.l(x) - stop(m.l(x).amax(-1, keepdim=True)))), l=linear(), shared=True),
    case("add_ in place", lambda m, x: (lambda h: h.add_(m.k(x)))(m.l(x)), l=linear(), k=linear()),
    case("mul_ in place with itself", lambda m, x: (lambda h: h.mul_(h.sigmoid()))(m.l(x)), l=linear()),
    case("clamp_ in place", lambda m, x: m.l(x).clamp_(-0.3, 0.4), l=linear()),
    case("dropout, then a product with itself", lambda m, x: (lambda h: h * F.dropout(h, 0.5, False))(m.l(x)), l=linear()),
    case("contiguous, then a product with itself", lambda m, x: (lambda h: h * h.contiguous())(m.l(x)), l=linear()),
    case("clone, then a sum with itself", lambda m, x: (lambda h: h + h.clone())(m.l(x)), l=linear()),
    case("buffer of zeros filled", lambda m, x: _filled(m.l(x)), l=linear()),
    case("index-add loop over experts", lambda m, x: _expert_loop(m, x), r=linear(5, 2), e=lambda: nn.ModuleList([nn.Linear(5, 4) for _ in range(2)])),
)


def _filled(h: Tensor) -> Tensor:
    y = torch.zeros(h.shape[0], 6, dtype=h.dtype)
    y[:, 1:5] = h
    y[:, 0] = h.sum(-1)
    return y


def _expert_loop(m: Any, x: Tensor) -> Tensor:
    """Every expert on all tokens, weighted by a mask of where the router sent them."""
    weight = m.r(x).softmax(-1)
    chosen = weight.argmax(-1)
    total = torch.zeros(x.shape[0], 4, dtype=x.dtype)
    for i, expert in enumerate(m.e):
        total = total + expert(x) * (weight[:, i] * (chosen == i))[:, None]
    return total


IDIOMS = [*ATTENTION, *JOINS, *ALIASES]
