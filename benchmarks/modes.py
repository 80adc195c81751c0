"""The modes that cost more than variances alone: whole covariances, and moments of activations, on small networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import propagauss as pg
from benchmarks.case import Case, Method

BATCH = 16
VARIANCE = 1e-4  # of every random parameter; timings depend on it only where a standard deviation is large


class Residual(nn.Module):
    """A layer and a branch of it that is added to it."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(32, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.head(h + self.down(self.up(h).tanh()))


class Gate(nn.Module):
    """The product of two layers, entry by entry."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.value, self.gate, self.head = nn.Linear(32, width), nn.Linear(32, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.value(x) * self.gate(x).sigmoid())


class Product(nn.Module):
    """The matrix product of two layers' outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 8)
        return self.left(x) @ self.right(x).transpose(1, 2)


class Tokens(nn.Module):
    """One attention layer over tokens."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(len(x), -1, 8)).chunk(3, -1)
        return self.norm(self.out(nn.functional.scaled_dot_product_attention(q, k, v)))


class Arctangent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.atan()


def images() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def layers(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), activation(), nn.Linear(128, 64), activation(), nn.Linear(64, 10))


FULL: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "layers": (partial(layers, nn.ReLU), 64),
    "convolutions": (images, 64),
    "residual": (Residual, 32),
    "gate": (Gate, 32),
    "product of layers": (Product, 32),
    "attention": (Tokens, 32),
}
MOMENTS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "clip": nn.Hardtanh,
    "hard shrinkage": nn.Hardshrink,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "softsign": nn.Softsign,
    "arctangent": Arctangent,
}


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    return [case for batch in batches or (BATCH,) for case in _cases(batch)]


def _cases(batch: int) -> list[Case]:
    full = [_case(f"modes/full/{n}/{batch}", make, i, batch, {"covariance": "full"}) for n, (make, i) in FULL.items()]
    moments = [
        _case(f"modes/moments/{n}/{batch}", partial(layers, made), 64, batch, {"activation": "moments"})
        for n, made in MOMENTS.items()
    ]
    options = {"activation": "moments"}
    wide = _case(f"modes/moments/gelu, a wide entry/{batch}", partial(layers, nn.GELU), 64, batch, options, "0.bias")
    return [*full, *moments, wide]


def _case(
    name: str, make: Callable[[], nn.Module], inputs: int, batch: int, options: dict[str, Any], wide: str | None = None
) -> Case:
    """The first entry of the parameter `wide` has a standard deviation of two."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    def streamlined() -> pg.Streamlined:
        net = model()
        variances = {n: torch.full_like(p, VARIANCE) for n, p in net.named_parameters()}
        if wide is not None:
            variances[wide][0] = 4.0
        return pg.streamline(net, pg.DiagonalPosterior(variances), x(), **options)

    def x() -> Tensor:
        return torch.randn(batch, inputs, generator=torch.Generator().manual_seed(1))

    title = f"{name.split('/')[2]}, {', '.join(f'{k}={v!r}' for k, v in options.items())}, batch {batch}"
    return Case(name, title, x, model, [Method("every parameter", streamlined)])
