"""How the cost grows: one property of a network varied at a time, diagonal posterior, ratio to its plain forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

import propagauss as pg
from benchmarks.case import Case, Method
from benchmarks.formulas import diagonal_products


@dataclass(frozen=True)
class Network:
    """A ReLU MLP whose last `bayesian` layers are random."""

    width: int = 256
    depth: int = 4  # linear layers
    classes: int = 10
    bayesian: int = 4
    batch: int = 64

    @property
    def sizes(self) -> list[int]:
        return [self.width] * self.depth + [self.classes]

    @property
    def random(self) -> list[bool]:
        return [i >= self.depth - self.bayesian for i in range(self.depth)]


VARIED = {
    "width": (32, 64, 128, 256, 512, 1024),
    "depth": (1, 2, 4, 8, 16),
    "classes": (2, 10, 100, 1000),
    "bayesian": (1, 2, 3, 4),
    "batch": (1, 4, 16, 64, 256, 1024),
}
OURS, COUNT, FULL = "streamlined", "count of multiplications", 'streamlined, covariance="full"'
FULL_UP_TO = 64  # width up to which the joint covariance is timed too: its cost is cubic


@cache
def model(network: Network) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(network.sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def streamlined(network: Network, covariance: Literal["diagonal", "full"]) -> pg.Streamlined:
    net = model(network)
    first = 2 * (network.depth - network.bayesian)  # names count the activations too
    variances = {n: torch.full_like(p, 1e-3) for n, p in net.named_parameters() if int(n.split(".")[0]) >= first}
    return pg.streamline(net, pg.DiagonalPosterior(variances), torch.zeros(2, network.width), covariance=covariance)


def inputs(network: Network) -> Tensor:
    return torch.randn(network.batch, network.width, generator=torch.Generator().manual_seed(0))


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    """The batch sizes of the command line have no say here: batch is one of the properties varied."""
    found = []
    for name, values in VARIED.items():
        for value in values:
            network = replace(Network(), **{name: value})
            network = replace(network, bayesian=min(network.bayesian if name == "bayesian" else 99, network.depth))
            found.append(_case(f"growth/{name}/{value}", network))
    return found


def _case(name: str, network: Network) -> Case:
    methods = [
        Method(COUNT, computed=lambda: diagonal_products(network.sizes, network.random)),
        Method(OURS, partial(streamlined, network, "diagonal")),
    ]
    if network.width <= FULL_UP_TO:
        methods.append(Method(FULL, partial(streamlined, network, "full")))
    title = (
        f"{network.depth} layers of width {network.width}, {network.bayesian} random, {network.classes} classes, "
        f"batch {network.batch}"
    )
    return Case(name, title, partial(inputs, network), partial(model, network), methods)
