"""A list of families that fills itself: `@FAMILIES("GCN")` above a function that returns a model and an example."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from families.family import Built, Family

BATCH = 3


class Register:
    def __init__(self, group: str):
        self.group = group
        self.families: list[Family] = []

    def __call__(self, name: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
        def add(build: Callable[[], Built]) -> Callable[[], Built]:
            self.families.append(Family(f"{self.group}/{name}", build))
            return build

        return add


def vectors(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths with an activation between them."""
    layers: list[nn.Module] = []
    for i, (inside, outside) in enumerate(itertools.pairwise(widths)):
        layers += [activation()] if i else []
        layers.append(nn.Linear(inside, outside))
    return nn.Sequential(*layers)


class Lambda(nn.Module):
    """A function of a module and the inputs, for models that are one formula."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module | nn.Parameter):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)
