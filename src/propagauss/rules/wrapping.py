"""What the rewriting itself puts into a network, around the rules proper: leaves, fused functions, generic ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from propagauss.gaussian import Gaussian
from propagauss.rules.elementwise.arithmetic import delta
from propagauss.structures import DIAGONAL, FULL, Structure


class RandomParameter(nn.Module):
    """A random parameter that is used on its own, outside a linear layer."""

    def __init__(self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None):
        super().__init__()
        self.register_buffer("mean", mean.clone())
        self.register_buffer("stored", (variance if covariance is None else covariance.unsqueeze(0)).clone())  # type: ignore[union-attr]
        self.kind: Structure = DIAGONAL if covariance is None else FULL

    def forward(self) -> Gaussian:
        return Gaussian.of(self.kind, self.mean, self.stored)  # type: ignore[arg-type]


class InputStructure(nn.Module):
    """Brings an uncertain input into the structure that the network carries."""

    def __init__(self, full: bool):
        super().__init__()
        self.kind: Structure = FULL if full else DIAGONAL

    def forward(self, x: Gaussian) -> Gaussian:
        return Gaussian.of(self.kind, x.mean, self.kind.read(x))


class Pointwise(nn.Module):
    """One elementwise op as a function of its uncertain argument, the other arguments filled in."""

    def __init__(self, op: Any, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        # without the node of the traced graph, which would drag all of that along into a copy
        self.op, self.at, self.kwargs = op, at, kwargs
        self.args = tuple(None if i == at else a for i, a in enumerate(args))
        self.alone = at == 0 and len(args) == 1 and not kwargs

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        if self.alone:
            return self.op(x)
        args = list(self.args)
        args[self.at] = x
        return self.op(*args, **self.kwargs)


def by_rows(x: Gaussian, rows: int) -> Gaussian:
    """An output whose first dimension counts `rows` for each sample, with the covariance of each row."""
    batch, n, _ = x.covariance.shape
    blocks = x.covariance.reshape(batch, rows, n // rows, rows, n // rows).diagonal(dim1=1, dim2=3)  # [B, n', n', rows]
    return Gaussian.full(x.mean, blocks.movedim(-1, 1).reshape(batch * rows, n // rows, n // rows))


def to_gaussian(x: Tensor) -> Any:
    """A deterministic output as a Gaussian of zero variance."""
    return Gaussian.diagonal(x, torch.zeros_like(x))


class Delta(nn.Module):
    """An elementwise op of several independent values; see `arithmetic.delta`."""

    def __init__(self, op: Any):
        super().__init__()
        self.op = op

    def forward(self, *args: Any) -> Gaussian:
        return delta(self.op, *args)
