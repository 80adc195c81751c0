"""What the rewriting itself puts into a network, around the rules proper: leaves, fused functions, generic ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from propagauss.gaussian import Gaussian
from propagauss.rules.arithmetic import delta


class RandomParameter(nn.Module):
    """A random parameter that is used on its own, outside a linear layer."""

    def __init__(self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None):
        super().__init__()
        self.register_buffer("mean", mean.clone())
        self.register_buffer("spread", (variance if covariance is None else covariance.unsqueeze(0)).clone())  # type: ignore[union-attr]
        self.is_full = covariance is not None

    def forward(self) -> Gaussian:
        build = Gaussian.full if self.is_full else Gaussian.diagonal
        return build(self.mean, self.spread)  # type: ignore[arg-type]


class InputStructure(nn.Module):
    """Brings an uncertain input into the structure that the network carries."""

    def __init__(self, full: bool):
        super().__init__()
        self.is_full = full

    def forward(self, x: Gaussian) -> Gaussian:
        return Gaussian.full(x.mean, x.covariance) if self.is_full else Gaussian.diagonal(x.mean, x.variance)


class LinearisedRegion(nn.Module):
    """Any deterministic function `f` of one Gaussian: `J C Jᵀ`, rows of `C` pushed through by forward derivatives.

    An affine function needs none: `J t = f(t) - f(0)`.
    """

    def __init__(self, function: nn.Module, affine: bool):
        super().__init__()
        self.function = function
        self.affine = affine

    def forward(self, x: Gaussian, *extras: Any) -> Gaussian:
        def f(t: Tensor) -> Tensor:
            return self.function(t, *extras)

        if self.affine:
            offset = f(torch.zeros_like(x.mean))
            return x.mapped(f(x.mean), lambda t: f(t) - offset)

        def rows(t: Tensor) -> Tensor:  # the derivative outside the vectorisation: the other order cannot be exported
            return torch.func.jvp(torch.vmap(f), (x.mean.expand_as(t).clone(),), (t,))[1]

        return x.mapped_rows(f(x.mean), rows)


class ParameterRegion(nn.Module):
    """A linear function of a random parameter that makes it part of every sample, such as an embedding.

    `C_b = J_b C J_bᵀ` with the rows of `J_b [n', n]` read off by sending unit vectors through the function.
    """

    def __init__(self, function: nn.Module):
        super().__init__()
        self.function = function

    def forward(self, x: Gaussian, *extras: Any) -> Gaussian:
        def f(t: Tensor) -> Tensor:
            return self.function(t, *extras)

        mean = f(x.mean)
        n = x.covariance.shape[-1]
        units = torch.eye(n, dtype=x.dtype, device=x.device).reshape(n, *x.mean.shape)
        batch, event = mean.shape[0], torch.Size(mean.shape[1:]).numel()
        jacobian = torch.vmap(f)(units).reshape(n, batch, event)
        half = torch.einsum("nm,mbl->nbl", x.covariance[0], jacobian)
        return Gaussian.full(mean, torch.einsum("nbk,nbl->bkl", jacobian, half))


class Pointwise(nn.Module):
    """One elementwise op as a function of its uncertain argument, the other arguments filled in."""

    def __init__(self, op: Any, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.op, self.at, self.args, self.kwargs = op, at, args, kwargs
        self.alone = at == 0 and len(args) == 1 and not kwargs

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        if self.alone:
            return self.op(x)
        args = list(self.args)
        args[self.at] = x
        return self.op(*args, **self.kwargs)


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
