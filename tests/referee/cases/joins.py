"""Values that meet again: residual and dense blocks, gates, mixtures of experts, loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from referee.case import Case, case, linear, normal, section

SEQUENCE = (3, 4)  # positions and width


def _residual(kappa: float) -> Case:
    return case(
        f"h + {kappa} Linear(h)", lambda m, x: (lambda h: h + kappa * m.k(h))(m.l(x)), l=linear(5, 4), k=linear(4, 4)
    )


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


JOINS = section(
    "Residual, dense and gated blocks",
    _residual(-0.9),
    _residual(1.0),
    case(
        "h + f(h), fixed branch",
        lambda m, x: (lambda h: h + m.k(h).relu())(m.l(x)),
        l=linear(),
        k=linear(4, 4),
        random=("l.weight",),
    ),
    case("h * Linear(h)", lambda m, x: (lambda h: h * m.k(h))(m.l(x)), l=linear(), k=linear(4, 4)),
    case(
        "cat of h and Linear(h), summed",
        lambda m, x: (lambda h: torch.cat([h, m.k(h)], -1).sum(-1))(m.l(x)),
        l=linear(),
        k=linear(4, 4),
    ),
    case("three residual blocks", _deep, l=linear(), a=linear(4, 4), b=linear(4, 4), c=linear(4, 4)),
    case(
        "residual blocks, one shared layer",
        lambda m, x: (lambda h: h + m.a(h + m.a(h).tanh()).tanh())(m.l(x)),
        l=linear(),
        a=linear(4, 4),
        shared=True,
    ),
    case("dense connections", _dense, l=linear(), a=linear(4, 3), b=linear(7, 2), c=linear(9, 2)),
    case(
        "convolutional residual block",
        lambda m, x: (lambda h: h + m.b(m.a(h).relu()))(m.s(x)),
        s=lambda: nn.Conv1d(2, 2, 1),
        a=lambda: nn.Conv1d(2, 3, 3, padding=1),
        b=lambda: nn.Conv1d(3, 2, 3, padding=1),
        x=(2, 3),
    ),
    case(
        "highway",
        lambda m, x: (lambda h, t: t * m.k(h).tanh() + (1 - t) * h)(m.l(x), torch.sigmoid(m.t(x))),
        l=linear(),
        k=linear(4, 4),
        t=linear(),
    ),
    case("layer scale", lambda m, x: (lambda h: h + m.g * m.k(h))(m.l(x)), l=linear(), k=linear(4, 4), g=(4,)),
    case("nn.GLU", lambda m, x: F.glu(m.l(x), -1), l=linear(5, 8)),
    case("GLU in pieces", lambda m, x: (lambda a, b: a * b.sigmoid())(*m.l(x).chunk(2, -1)), l=linear(5, 8)),
    case("SwiGLU", lambda m, x: m.d(F.silu(m.g(x)) * m.u(x)), g=linear(), u=linear(), d=linear(4, 3)),
    case(
        "SwiGLU of a random value",
        lambda m, x: (lambda h: m.d(F.silu(m.g(h)) * m.u(h)))(m.l(x)),
        l=linear(),
        g=linear(4, 3),
        u=linear(4, 3),
        d=linear(3, 2),
    ),
    case(
        "squeeze and excitation",
        lambda m, x: (lambda h: h * m.e(h.mean(-1)).sigmoid()[..., None])(m.c(x)),
        c=lambda: nn.Conv1d(2, 3, 1),
        e=linear(3, 3),
        x=(2, 4),
    ),
    case("two inputs", lambda m, a, b: m.l(a) * m.k(b), l=linear(5, 3), k=linear(4, 3), x=normal((5,), (4,))),
    case("two outputs", lambda m, x: (lambda h: (h, m.k(h)))(m.l(x)), l=linear(), k=linear(4, 2)),
    case("one value as both outputs", lambda m, x: (lambda h: (h, h))(m.l(x)), l=linear()),
    case("a fixed output beside a random one", lambda m, x: (m.l(x), x.sum(-1)), l=linear()),
    case("h + h", lambda m, x: (lambda h: h + h)(m.l(x)), l=linear()),
    case("h - h.mean()", lambda m, x: (lambda h: h - h.mean(-1, keepdim=True))(m.l(x)), l=linear()),
    case(
        "ensemble of layers, averaged", lambda m, x: (m.a(x) + m.b(x) + m.c(x)) / 3, a=linear(), b=linear(), c=linear()
    ),
    case("neural ODE, four steps", lambda m, x: _ode(m, m.l(x)), l=linear(), f=linear(4, 4), shared=True),
    case(
        "mixture of experts, all",
        lambda m, x: (lambda g: g[:, :1] * m.a(x) + g[:, 1:] * m.b(x))(m.r(x).softmax(-1)),
        r=linear(5, 2),
        a=linear(),
        b=linear(),
    ),
    case("mixture of experts, top 1", lambda m, x: _top1(m, x), r=linear(5, 2), a=linear(), b=linear()),
    case(
        "mixture of experts, stacked weights",
        lambda m, x: torch.einsum("bi,eoi,be->bo", x, m.w, m.r(x).softmax(-1)),
        r=linear(5, 3),
        w=(3, 4, 5),
    ),
    case(
        "selective scan", lambda m, x: _scan(m, x), d=linear(4, 4), b=linear(4, 2), c=linear(4, 2), a=(4, 2), x=SEQUENCE
    ),
    case(
        "token shift",
        lambda m, x: (lambda h: m.w * h + (1 - m.w) * F.pad(h, (0, 0, 1, -1)))(m.l(x)),
        l=linear(4, 4),
        w=(4,),
        x=SEQUENCE,
    ),
    case(
        "relative position bias",
        lambda m, x: m.l(x) + m.t[:, torch.arange(3)[:, None] - torch.arange(3) + 2].sum(0)[..., :1],
        l=linear(4, 4),
        t=(2, 5),
        x=SEQUENCE,
    ),
    case(
        "torch.multiply and torch.subtract",
        lambda m, x: torch.subtract(torch.multiply(m.l(x), m.k(x)), x[:, :4]),
        l=linear(),
        k=linear(),
    ),
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
