"""Adjoints of functions of single entries: `g y'`, summed over what was broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from propagauss.rules.adjoints.registry import adjoint, unbroadcast, unbroadcast_per_sample
from propagauss.rules.elementwise.slopes import UNARY
from propagauss.rules.entries import shape  # noqa: F401 (states facts about ops)
from propagauss.rules.facts import having

aten = torch.ops.aten
_SAME = (aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default, aten.dropout.default)


# adjoints that multiply by a slope -> the slope, for whoever can use it in another way
SLOPES: dict[Any, Callable[..., Tensor]] = {}


def _unary(op: Any, slope: Callable[..., Tensor]) -> None:
    def pulled(g: Tensor, i: int, y: Tensor, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return g * slope(x, y, *rest, **named)

    SLOPES[adjoint(op)(pulled)] = slope


def sign(x: Tensor, y: Tensor) -> Tensor:
    """The slope of a ReLU, cheaper than a comparison and a cast."""
    return y.sign()


for _op, _derivative in (UNARY | {aten.relu.default: sign}).items():
    _unary(_op, _derivative)


@adjoint(*_SAME)
def same(g: Tensor, i: int, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return g


@adjoint(*having("casts"))
def cast(g: Tensor, i: int, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return g.to(x.dtype)


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else ()


def _pair(op: Any, slope: Any) -> None:
    """An op of two values; `slope` is its derivative with respect to one of them, as a factor of `g`."""

    def pulled(g: Tensor, i: int, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lead = g.dim() - y.dim()
        return unbroadcast(slope(g, i, y, *args, **kwargs), lead, _shape(args[i]))

    def per_sample(g: Tensor, i: int, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return unbroadcast_per_sample(slope(g, i, y, *args, **kwargs), _shape(args[i]))

    adjoint(op)(pulled)
    adjoint(op, per_sample=True)(per_sample)


def _add(g: Tensor, i: int, y: Tensor, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return g * alpha if i == 1 and alpha != 1 else g


def _sub(g: Tensor, i: int, y: Tensor, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return g * -alpha if i == 1 else g


def _rsub(g: Tensor, i: int, y: Tensor, a: Any, b: Any, alpha: float = 1) -> Tensor:
    return g * -alpha if i == 0 else g


def _mul(g: Tensor, i: int, y: Tensor, a: Any, b: Any) -> Tensor:
    return g * (b if i == 0 else a)


def _div(g: Tensor, i: int, y: Tensor, a: Any, b: Any) -> Tensor:
    return g / b if i == 0 else -g * y / b


def _where(g: Tensor, i: int, y: Tensor, condition: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(condition, g, 0.0) if i == 1 else torch.where(condition, 0.0, g)


def _maximum(g: Tensor, i: int, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Half to each where they are equal, as autograd has it."""
    share = (a > b).to(g.dtype) + 0.5 * (a == b).to(g.dtype)
    return g * (share if i == 0 else 1 - share)


def _minimum(g: Tensor, i: int, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _maximum(g, 1 - i, y, a, b)


for _op, _slope in {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: _rsub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.where.self: _where,
    aten.maximum.default: _maximum,
    aten.minimum.default: _minimum,
}.items():
    _pair(_op, _slope)


@adjoint(aten.masked_fill.Scalar)
def masked_fill(g: Tensor, i: int, y: Tensor, x: Tensor, mask: Tensor, value: float) -> Tensor:
    return unbroadcast(g.masked_fill(mask, 0.0), g.dim() - y.dim(), x.shape)
