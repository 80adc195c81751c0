"""What calls with wrong arguments are made of."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from propagauss import tasks

NAN, INF = math.nan, math.inf
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0])
TARGETS = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
PROBS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.6, 0.4]])
EYE = torch.eye(2)
V = torch.ones(2)


class Then(nn.Module):
    """A layer, then any function."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 2), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def drawn(h: Tensor) -> Tensor:
    return h + torch.randn(2, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged)


def quantised() -> Tensor:
    return torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)


def broken() -> nn.Module:
    model = mlp()
    model[0].weight.data.fill_(NAN)
    return model


def with_weight(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(change(model.weight.detach()))
    return model


def fidelity(t: Any, **given: Any) -> Any:
    right = {"net": t.net, "model": t.model, "posterior": t.posterior, "inputs": X, "progress": False}
    return tasks.fidelity(**{**right, **given})


Row = tuple[str, str, Callable[[Any], Any], str]  # the public name, what is wrong, the call, a pattern of the message


def adder(rows: list[Row]) -> Callable[..., None]:
    """A function that takes all that is tried with one name."""

    def add(name: str, *tried: tuple[str, Callable[[Any], Any], str]) -> None:
        rows.extend((name, what, call, match) for what, call, match in tried)

    return add
