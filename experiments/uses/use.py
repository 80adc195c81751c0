"""What a use is: a trained model, its data in three parts, and inputs that are far from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.frame.experiment import Context
from propagauss.likelihoods.registry import LikelihoodName

Batches = list[Any]  # as loaders yield them: `(x, y)`, or dictionaries with labels


@dataclass(frozen=True)
class Use:
    model: nn.Module
    likelihood: LikelihoodName
    train: Batches
    validation: Batches
    test: Batches
    far: Batches  # inputs alone
    nearer: Batches | None = None  # inputs that are other, and yet not far


@dataclass(frozen=True)
class Kind:
    """How a use is made, and how it is called."""

    title: str
    far: str  # what its far inputs are
    make: Callable[[Context, int], Use]  # from a seed
    nearer: str = ""


def pairs(x: Tensor, y: Tensor, size: int = 128) -> Batches:
    return list(zip(x.split(size), y.split(size), strict=True))


def parts(x: Tensor, y: Tensor, *sizes: int) -> list[Batches]:
    """Consecutive parts of these sizes, in batches."""
    return [pairs(*part) for part in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True)]


def trained(
    model: nn.Module, loss: Callable[[Any], Tensor], data: Batches, steps: int, rate: float = 3e-3, decay: float = 1e-4
) -> nn.Module:
    """AdamW over random batches; `loss` maps a batch to a number. Parameters that are frozen stay so."""
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(chosen, rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            loss(data[int(torch.randint(len(data), ()))]).backward()
            optimiser.step()
            schedule.step()
    return model.eval()
