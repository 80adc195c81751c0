"""Detach, values that share memory, and ops in place."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from referee.case import case, linear, module, section
from referee.truth import stop, unless_stating

SEQUENCE = (3, 4)  # positions and width


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


ALIASES = section(
    "Detach, aliases and ops in place",
    *(
        case(f"{kind}, then relu_, and a skip", _inplace(kind), l=linear())
        for kind in ("dropout", "contiguous", "to", "reshape", "view", "expand", "h[:]", "slice", "clone", "detach")
    ),
    module("nn.Dropout, nn.ReLU(inplace=True), skip", _Skip),
    case("h * h.detach()", lambda m, x: (lambda h: h * stop(h))(m.l(x)), l=linear()),
    case("straight-through sign", lambda m, x: (lambda h: h + stop(h.tanh() - h))(m.l(x)), l=linear()),
    case("straight-through rounding", lambda m, x: (lambda h: h + stop(h.round() - h))(m.l(x)), l=linear()),
    case("detached branch", lambda m, x: (lambda h: h + m.k(stop(h)))(m.l(x)), l=linear(), k=linear(4, 4)),
    case("detached output", lambda m, x: stop(m.l(x)), l=linear()),
    case(
        "detached maximum in a softmax",
        lambda m, x: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(m.l(x) - stop(m.l(x).amax(-1, keepdim=True)))),
        l=linear(),
        shared=True,
    ),
    case("add_ in place", lambda m, x: (lambda h: h.add_(m.k(x)))(m.l(x)), l=linear(), k=linear()),
    case("mul_ in place with itself", lambda m, x: (lambda h: h.mul_(h.sigmoid()))(m.l(x)), l=linear()),
    case("clamp_ in place", lambda m, x: m.l(x).clamp_(-0.3, 0.4), l=linear()),
    case(
        "dropout, then a product with itself", lambda m, x: (lambda h: h * F.dropout(h, 0.5, False))(m.l(x)), l=linear()
    ),
    case("contiguous, then a product with itself", lambda m, x: (lambda h: h * h.contiguous())(m.l(x)), l=linear()),
    case("clone, then a sum with itself", lambda m, x: (lambda h: h + h.clone())(m.l(x)), l=linear()),
    case("layer under no_grad", lambda m, x: _without_gradients(m, x), l=linear(), k=linear(4, 4)),
    case("layer under autocast(enabled=False)", lambda m, x: _under_autocast(m, x), l=linear(), k=linear(4, 4)),
    case("tensor made in the forward", lambda m, x: m.l(x) * torch.tensor([1.0, 2.0, -1.0, 0.5]).to(x), l=linear()),
    case(
        "masked_select, data-dependent size", lambda m, x: m.l(x) * m.l(x).masked_select(x[:, :4] > 0).sum(), l=linear()
    ),
    case("index-add of routed tokens", lambda m, x: _routed(m, x), r=linear(5, 2), e=linear()),
    case("buffer of zeros filled", lambda m, x: _filled(m.l(x)), l=linear()),
    case(
        "index-add loop over experts",
        lambda m, x: _expert_loop(m, x),
        r=linear(5, 2),
        e=lambda: nn.ModuleList([nn.Linear(5, 4) for _ in range(2)]),
    ),
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


def _without_gradients(m: Any, x: Tensor) -> Tensor:
    """Gradients stop there, variances do not."""
    h = m.l(x)
    with nullcontext() if unless_stating(True) is None else torch.no_grad():
        h = m.k(h).tanh()
    return h.square()


def _under_autocast(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    with nullcontext() if unless_stating(True) is None else torch.autocast("cpu", enabled=False):
        h = m.k(h).tanh()
    return h.square()


def _routed(m: Any, x: Tensor) -> Tensor:
    """One expert, on the tokens that the router sends to it."""
    (chosen,) = torch.where(m.r(x).argmax(-1) == 0)
    return torch.zeros(x.shape[0], 4, dtype=x.dtype).index_add(0, chosen, m.e(x[chosen]))
