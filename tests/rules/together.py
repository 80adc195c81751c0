"""Several networks exported or compiled as one: half of what it takes is the same for any network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import propagauss as pg
from propagauss.tracing.exporting import quietly


class Together(nn.Module):
    """Several networks as one, each with its own inputs."""

    def __init__(self, nets: Sequence[nn.Module]):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, inputs: list[tuple[Any, ...]]) -> list[pg.Gaussian]:
        return [net(*x) for net, x in zip(self.nets, inputs, strict=True)]


def exported(nets: Sequence[nn.Module], inputs: list[tuple[Any, ...]]) -> list[pg.Gaussian]:
    """What the networks return from one exported program."""
    return quietly(lambda: torch.export.export(Together(nets), (inputs,), strict=False)).module()(inputs)


def compiled(nets: Sequence[nn.Module], inputs: list[tuple[Any, ...]]) -> list[pg.Gaussian]:
    """What the networks return when they are compiled into one graph."""
    torch._dynamo.reset()
    return torch.compile(Together(nets), fullgraph=True, backend="eager")(inputs)
