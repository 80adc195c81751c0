"""Linear layers, and what models use as their weights: stored, masked, computed, tied."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import WeightNorm

from referee.case import case, linear, module, section

MASK = torch.tensor([[1.0, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 0, 1, 1], [1, 0, 1, 0, 1]])
TEN = torch.full((4,), 10.0)


def _old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WeightNorm.apply(layer, "weight", 0)
    return layer


LINEAR = section(
    "Linear layers and their weights",
    module("nn.Linear", linear()),
    module("nn.Linear without bias", linear(bias=False)),
    module("nn.Linear, random bias only", linear(), random=("bias",)),
    module("nn.Linear over positions", linear(), (3, 5)),
    module("two layers", lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))),
    module(
        "fixed layer after a random one", lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), random=("0.weight",)
    ),
    case("x @ w", lambda m, x: x @ m.w, w=(5, 4)),
    case("x @ w.T + b", lambda m, x: x @ m.w.T + m.b, w=(4, 5), b=(4,)),
    case("w @ h", lambda m, x: m.w @ m.l(x).unsqueeze(-1), w=(3, 4), l=linear()),
    case("h @ vector", lambda m, x: m.l(x) @ m.w, w=(4,), l=linear()),
    case("vector @ h", lambda m, x: m.w @ m.l(x), w=(3,), l=linear(), x=(3, 5)),
    case("addmm", lambda m, x: torch.addmm(m.b, x, m.w), w=(5, 4), b=(4,)),
    case(
        "addmm, beta and alpha",
        lambda m, x: torch.addmm(m.b, m.l(x), m.w, beta=0.5, alpha=2.0),
        w=(4, 3),
        b=(3,),
        l=linear(),
    ),
    case(
        "addmm, beta and alpha, fixed input",
        lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0),
        w=(5, 3),
        b=(3,),
    ),
    case("addmm, random bias alone", lambda m, x: torch.addmm(m.b, x, x.new_ones(5, 3), beta=0.5), b=(3,)),
    case("baddbmm", lambda m, x: torch.baddbmm(m.b, m.l(x), m.l(x).mT), b=(3, 3), l=linear(), x=(3, 5)),
    case("nn.Bilinear", lambda m, x: m.l(x, x.sin()), l=lambda: nn.Bilinear(5, 5, 3)),
    case("nn.Bilinear, fixed bias", lambda m, x: m.l(x, x.sin()), l=lambda: nn.Bilinear(5, 5, 3), random=("l.weight",)),
    case(
        "nn.Bilinear of random values",
        lambda m, x: m.b(m.l(x), m.k(x)),
        b=lambda: nn.Bilinear(4, 4, 2),
        l=linear(),
        k=linear(),
    ),
    case("masked weight", lambda m, x: F.linear(x, m.w * m.mask, m.b), w=(4, 5), mask=MASK, b=(4,)),
    case("masked weight, fixed bias of 10", lambda m, x: F.linear(x, m.w * m.mask, m.b), w=(4, 5), mask=MASK, b=TEN),
    case("exp of a weight", lambda m, x: F.linear(x, m.w.exp(), m.b), w=(4, 5), b=TEN),
    case("softplus of a weight", lambda m, x: F.linear(x, F.softplus(m.w), m.b), w=(4, 5), b=(4,)),
    case("twice a weight", lambda m, x: F.linear(x, 2 * m.w, m.b), w=(4, 5), b=TEN),
    case("slice of a weight", lambda m, x: F.linear(x, m.w[:2], m.b[:2]), w=(4, 5), b=(4,)),
    case("view of a weight", lambda m, x: F.linear(x, m.w.view(4, 5), m.b), w=(20,), b=TEN),
    case(
        "standardised weight",
        lambda m, x: F.linear(x, (m.w - m.w.mean(1, keepdim=True)) / m.w.std(1, keepdim=True)),
        w=(4, 5),
    ),
    case("low-rank update W + B A", lambda m, x: F.linear(x, m.w + m.b @ m.a), w=(4, 5), b=(4, 2), a=(2, 5)),
    case("LoRA branch", lambda m, x: m.l(x) + 2 * F.linear(F.linear(x, m.a), m.b), l=linear(), b=(4, 2), a=(2, 5)),
    case("product of two weights", lambda m, x: F.linear(x, m.w1 @ m.w2), w1=(4, 3), w2=(3, 5)),
    case("gated weight W * g", lambda m, x: F.linear(x, m.w * m.g), w=(4, 5), g=(4, 1)),
    case("gated weight, gate of inputs", lambda m, x: F.linear(x, m.w * m.g, m.b), w=(4, 5), g=(5,), b=(4,)),
    case(
        "weight of a random input, computed",
        lambda m, x: F.linear(m.l(x), m.w.tanh(), m.b),
        w=(3, 4),
        b=(3,),
        l=linear(),
    ),
    case("weight made by a layer", lambda m, x: F.linear(x, m.l(m.code)), l=linear(3, 5), code=torch.eye(4, 3)),
    case("weight made from the input", lambda m, x: torch.bmm(m.l(x).view(-1, 2, 5), x.unsqueeze(-1)), l=linear(5, 10)),
    case("concatenated weights", lambda m, x: F.linear(x, torch.cat([m.a, m.b])), a=(2, 5), b=(2, 5)),
    case("weight norm", lambda m, x: m.l(x), l=lambda: parametrizations.weight_norm(nn.Linear(5, 4))),
    case("weight norm, old style", lambda m, x: m.l(x), l=lambda: _old_weight_norm(nn.Linear(5, 4))),
    case("spectral norm", lambda m, x: m.l(x), l=lambda: parametrizations.spectral_norm(nn.Linear(5, 4))),
    case(
        "orthogonal weight",
        lambda m, x: m.l(x),
        l=lambda: parametrizations.orthogonal(nn.Linear(5, 5), use_trivialization=False),
    ),
    case("tied weight", lambda m, x: F.linear(m.l(x).tanh(), m.l.weight.T), l=linear(), shared=True),
    case("layer used twice", lambda m, x: m.l(m.l(x).tanh()), l=linear(5, 5), shared=True),
    case("layer used on two inputs", lambda m, x: m.l(x) * m.l(x.sin()), l=linear(), shared=True),
    case("e = w.exp(); x * e + e", lambda m, x: x * m.w.exp() + m.w.exp(), w=(5,), shared=True),
    case("e reused", lambda m, x: (lambda e: x * e + e)(m.w.exp()), w=(5,), shared=True),
    case("einsum of a weight", lambda m, x: torch.einsum("bi,oi->bo", x, m.w), w=(4, 5)),
    case(
        "einsum of a weight and a random value",
        lambda m, x: torch.einsum("bi,oi->bo", m.l(x), m.w),
        w=(3, 4),
        l=linear(),
    ),
    case("einsum with the weight twice", lambda m, x: torch.einsum("bi,ij,kj->bk", x, m.w, m.w), w=(5, 5), shared=True),
    case(
        "einsum of three", lambda m, x: torch.einsum("bi,ij,jk->bk", m.l(x), m.w, m.v), w=(4, 3), v=(3, 2), l=linear()
    ),
    case(
        "einsum of three, fixed factors",
        lambda m, x: torch.einsum("bi,ij,jk->bk", m.l(x), m.w, m.v),
        w=MASK[:, :3],
        v=MASK[:3],
        l=linear(),
    ),
    case("tensordot", lambda m, x: torch.tensordot(x, m.w, dims=([1, 2], [0, 1])), w=(3, 5, 2), x=(3, 5)),
    case("torch.inner", lambda m, x: torch.inner(m.l(x), m.w), w=(3, 4), l=linear()),
    case("cdist to parameters", lambda m, x: torch.cdist(x, m.w), w=(4, 5)),
    case("cdist of a random value", lambda m, x: torch.cdist(m.l(x), m.w), w=(3, 4), l=linear()),
    case("squared distance in pieces", lambda m, x: (m.l(x)[:, None] - m.w).square().sum(-1), w=(3, 4), l=linear()),
    case("cosine similarity to parameters", lambda m, x: F.cosine_similarity(x[:, None], m.w, dim=-1), w=(4, 5)),
    case(
        "cosine similarity of two values",
        lambda m, x: F.cosine_similarity(m.l(x), m.k(x), dim=-1),
        l=linear(),
        k=linear(),
    ),
    case("pairwise_distance", lambda m, x: F.pairwise_distance(m.l(x), m.k(x)), l=linear(), k=linear()),
    case("parameter added", lambda m, x: x + m.w, w=(5,)),
    case("parameter as a factor", lambda m, x: m.l(x) * m.w, w=(4,), l=linear()),
    case("scalar parameter", lambda m, x: m.l(x) * m.w, w=(), l=linear()),
    case("temperature", lambda m, x: m.l(x) / m.w.exp(), w=(), l=linear()),
    case("masked_fill of a parameter", lambda m, x: (m.w + 0 * x).masked_fill(x > 0, 3.0), w=(5,)),
    case("masked_fill straight of a parameter", lambda m, x: torch.masked_fill(m.w, x > 0, 3.0), w=(5,)),
    case(
        "class token",
        lambda m, x: torch.cat([m.w.expand(x.shape[0], -1, -1), m.l(x)], 1),
        w=(1, 1, 4),
        l=linear(),
        x=(3, 5),
    ),
    case("positions added", lambda m, x: m.l(x) + m.w, w=(1, 3, 4), l=linear(), x=(3, 5)),
    case("learned queries", lambda m, x: m.w @ m.l(x).mT, w=(2, 4), l=linear(), x=(3, 5)),
    case(
        "KAN splines",
        lambda m, x: torch.einsum("bik,oik->bo", torch.exp(-((x[..., None] - m.g) ** 2)), m.w),
        w=(3, 5, 4),
        g=torch.linspace(-2, 2, 4),
    ),
)
