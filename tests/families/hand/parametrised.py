"""Weights that are computed: norms, orthogonality, low-rank sums, hypernetworks, masks; and routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations as parametrised
from torch.nn.utils import weight_norm

from families.family import Built
from families.hand.register import Lambda, Register, mlp, vectors

FAMILIES = Register("parametrised")
WIDTH = 8


def _dense(wrap: object) -> Built:
    return nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), wrap(nn.Linear(WIDTH, WIDTH))), (vectors(WIDTH),)


def _convolutional(wrap: object) -> Built:
    layers = [wrap(nn.Conv1d(4, 4, 3, padding=1)), nn.ReLU(), wrap(nn.Conv1d(4, 2, 3, padding=1))]
    return nn.Sequential(*layers), (vectors(4, 8),)


FAMILIES("weight norm")(lambda: _dense(parametrised.weight_norm))
FAMILIES("weight norm, old style")(lambda: _dense(weight_norm))
FAMILIES("weight norm, convolution")(lambda: _convolutional(parametrised.weight_norm))
FAMILIES("weight norm, convolution over all but time")(
    lambda: _convolutional(lambda m: parametrised.weight_norm(m, dim=2))
)
FAMILIES("spectral norm")(lambda: _dense(parametrised.spectral_norm))
FAMILIES("spectral norm, convolution")(lambda: _convolutional(parametrised.spectral_norm))
FAMILIES("orthogonal, Householder")(lambda: _dense(lambda m: parametrised.orthogonal(m, orthogonal_map="householder")))
FAMILIES("orthogonal, Cayley")(lambda: _dense(lambda m: parametrised.orthogonal(m, orthogonal_map="cayley")))
FAMILIES("orthogonal, exponential")(lambda: _dense(lambda m: parametrised.orthogonal(m, orthogonal_map="matrix_exp")))


class Computed(nn.Module):
    """A linear layer whose weight is a function of its parameters."""

    def __init__(self, weight: object, **shapes: tuple[int, ...]):
        super().__init__()
        self.compute, self.bias = weight, nn.Parameter(torch.randn(WIDTH))
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 3))
        self.register_buffer("mask", (torch.rand(WIDTH, WIDTH) > 0.3).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.compute(self), self.bias)


def _computed(name: str, weight: object, **shapes: tuple[int, ...]) -> None:
    FAMILIES(name)(
        lambda: (nn.Sequential(Computed(weight, **shapes), nn.Tanh(), Computed(weight, **shapes)), (vectors(WIDTH),))
    )


SQUARE = (WIDTH, WIDTH)
_computed("LoRA, merged", lambda m: m.w + 2.0 * m.b @ m.a, w=SQUARE, b=(WIDTH, 2), a=(2, WIDTH))
_computed(
    "DoRA",
    lambda m: m.g * (m.w + m.b @ m.a) / (m.w + m.b @ m.a).norm(dim=1, keepdim=True),
    w=SQUARE,
    b=(8, 2),
    a=(2, 8),
    g=(8, 1),
)
_computed("low-rank product", lambda m: m.b @ m.a, b=(WIDTH, 3), a=(3, WIDTH))
_computed("masked (pruned)", lambda m: m.w * m.mask, w=SQUARE)
_computed("symmetric", lambda m: m.w.triu() + m.w.triu(1).T, w=SQUARE)
_computed("circulant", lambda m: torch.stack([m.w.roll(i) for i in range(WIDTH)]), w=(WIDTH,))
_computed("Kronecker product", lambda m: torch.kron(m.a, m.b), a=(2, 2), b=(4, 4))
_computed(
    "tensor train", lambda m: torch.einsum("air,rbj->abij", m.a, m.b).reshape(WIDTH, WIDTH), a=(2, 2, 3), b=(3, 4, 4)
)
_computed("weight standardisation", lambda m: (m.w - m.w.mean(1, keepdim=True)) / m.w.std(1, keepdim=True), w=SQUARE)
_computed("fake quantisation", lambda m: m.w + ((m.w * 8).round() / 8 - m.w).detach(), w=SQUARE)
_computed("ternary (BitNet)", lambda m: m.w + (m.w.sign() * m.w.abs().mean() - m.w).detach(), w=SQUARE)
_computed("positive by softplus", lambda m: F.softplus(m.w), w=SQUARE)
_computed("stochastic by softmax", lambda m: m.w.softmax(-1), w=SQUARE)
_computed("Householder reflections", lambda m: torch.eye(8) - 2 * torch.outer(m.v, m.v) / m.v.dot(m.v), v=(WIDTH,))
_computed(
    "skew-symmetric, Cayley",
    lambda m: torch.linalg.solve(torch.eye(8) + m.w - m.w.T, torch.eye(8) - m.w + m.w.T),
    w=SQUARE,
)
_computed("diagonal plus low rank", lambda m: torch.diag(m.d) + torch.outer(m.u, m.v), d=(8,), u=(8,), v=(8,))


@FAMILIES("LoRA, beside the layer")
def lora() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.base(x) + 2.0 * self.b(self.a(x))))

    parts = {"a": nn.Linear(WIDTH, 2, bias=False), "b": nn.Linear(2, WIDTH, bias=False)}
    return Lambda(forward, base=nn.Linear(WIDTH, WIDTH), **parts, head=nn.Linear(WIDTH, 2)), (vectors(WIDTH),)


@FAMILIES("hypernetwork, per sample")
def hypernetwork() -> Built:
    def forward(self: nn.Module, x: Tensor, context: Tensor) -> Tensor:
        w = self.hyper(context).unflatten(-1, (4, WIDTH))
        return self.head(torch.relu(torch.bmm(w, x[..., None]).squeeze(-1)))

    return Lambda(forward, hyper=mlp(3, 8, 4 * WIDTH), head=nn.Linear(4, 2)), (vectors(WIDTH), vectors(3))


@FAMILIES("hypernetwork, from an embedding")
def hyper_embedding() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for i in range(2):
            x = torch.tanh(F.linear(x, self.hyper(self.layer.weight[i]).view(WIDTH, WIDTH)))
        return self.head(x)

    parts = {"layer": nn.Embedding(2, 4), "hyper": mlp(4, 8, WIDTH * WIDTH), "head": nn.Linear(WIDTH, 2)}
    return Lambda(forward, **parts), (vectors(WIDTH),)


@FAMILIES("conditional layers (FiLM)")
def film() -> Built:
    def forward(self: nn.Module, x: Tensor, context: Tensor) -> Tensor:
        gain, shift = self.film(context).chunk(2, -1)
        return self.head(torch.relu((1 + gain) * self.base(x) + shift))

    parts = {"film": nn.Linear(3, 2 * WIDTH), "base": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 2)}
    return Lambda(forward, **parts), (vectors(WIDTH), vectors(3))


@FAMILIES("highway network")
def highway() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            t = gate(x).sigmoid()
            x = t * torch.relu(layer(x)) + (1 - t) * x
        return self.head(x)

    parts = {n: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for n in ("layers", "gates")}
    return Lambda(forward, **parts, head=nn.Linear(WIDTH, 2)), (vectors(WIDTH),)


@FAMILIES("maxout")
def maxout() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(self.first(x).unflatten(-1, (-1, 3)).max(-1).values)

    return Lambda(forward, first=nn.Linear(WIDTH, 18), head=nn.Linear(6, 2)), (vectors(WIDTH),)


@FAMILIES("bilinear layer")
def bilinear() -> Built:
    def forward(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pair(self.a(x), y)))

    return Lambda(forward, a=nn.Linear(8, 4), pair=nn.Bilinear(4, 3, 6), head=nn.Linear(6, 2)), (
        vectors(WIDTH),
        vectors(3),
    )


class Experts(nn.Module):
    """Top-2 of four experts: `dense` weighs all of them, `loop` gathers tokens per expert, `gather` picks weights."""

    def __init__(self, way: str):
        super().__init__()
        self.router, self.way, self.head = nn.Linear(WIDTH, 4), way, nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(mlp(WIDTH, 16, WIDTH, activation=nn.SiLU) for _ in range(4))
        self.up = nn.Parameter(torch.randn(4, WIDTH, 16) / 3) if way == "gather" else None
        self.down = nn.Parameter(torch.randn(4, 16, WIDTH) / 3) if way == "gather" else None

    def forward(self, x: Tensor) -> Tensor:
        weight, index = self.router(x).softmax(-1).topk(2, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        if self.way == "gather":
            h = F.silu(torch.einsum("bi,bkio->bko", x, self.up[index]))
            return self.head(torch.einsum("bko,bkoi,bk->bi", h, self.down[index], weight))
        if self.way == "dense":
            gates = torch.zeros(x.shape[0], 4).scatter(1, index, weight)
            return self.head((torch.stack([e(x) for e in self.experts], 1) * gates[..., None]).sum(1))
        total = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = ((index == i) * weight).sum(-1, keepdim=True)
            total.add_(chosen * expert(x))
        return self.head(x + total)


FAMILIES("mixture of experts, scattered gates")(lambda: (Experts("dense"), (vectors(WIDTH),)))
FAMILIES("mixture of experts, loop")(lambda: (Experts("loop"), (vectors(WIDTH),)))
FAMILIES("mixture of experts, gathered weights")(lambda: (Experts("gather"), (vectors(WIDTH),)))


@FAMILIES("soft mixture of experts")
def soft() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        logits = x @ self.slots
        slots = logits.softmax(1).transpose(1, 2) @ x
        out = torch.stack([e(slots[:, i]) for i, e in enumerate(self.experts)], 1)
        return logits.softmax(2) @ out

    experts = nn.ModuleList(mlp(WIDTH, 16, WIDTH) for _ in range(3))
    return Lambda(forward, slots=nn.Parameter(torch.randn(WIDTH, 3)), experts=experts), (vectors(5, WIDTH),)


@FAMILIES("deep ensemble of heads")
def ensemble() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([head(self.body(x)) for head in self.heads]).softmax(-1).mean(0).log()

    return Lambda(forward, body=mlp(8, 16, 8), heads=nn.ModuleList(mlp(8, 8, 3) for _ in range(3))), (vectors(WIDTH),)
