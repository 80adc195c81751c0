"""Which ops are piecewise polynomials, and which functions made of several ops are: `where(x > 0, x, 0.)` is a ReLU.

`as_pieces` runs a graph on piecewise polynomials in place of tensors. Comparisons become functions that are 0 or 1, so
that what they decide is part of the function and not decided by the mean.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from propagauss.rules.elementwise.pieces import IDENTITY, ZERO, Pieces, Polynomial, constant

aten = torch.ops.aten

# -- ops of one variable


def _leaky(negative_slope: float = 0.01) -> Pieces:
    return Pieces((0.0,), ((0.0, negative_slope, 0.0), IDENTITY))


def _rrelu(lower: float = 1 / 8, upper: float = 1 / 3, *_: Any) -> Pieces:
    return _leaky((lower + upper) / 2)  # as in evaluation mode


def _clamp(min: float | None = None, max: float | None = None) -> Pieces:
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    if low >= high:
        return Pieces((), (constant(high),))
    result = Pieces((), (IDENTITY,))
    if math.isfinite(low):
        result = Pieces((low,), (constant(low), IDENTITY))
    if math.isfinite(high):
        result = Pieces((*result.knots, high), (*result.polynomials, constant(high)))
    return result


def _threshold(threshold: float, value: float) -> Pieces:
    return Pieces((threshold,), (constant(value), IDENTITY))


def _hardshrink(lambd: float = 0.5) -> Pieces:
    return Pieces((-lambd, lambd), (IDENTITY, ZERO, IDENTITY))


def _softshrink(lambd: float = 0.5) -> Pieces:
    return Pieces((-lambd, lambd), ((lambd, 1.0, 0.0), ZERO, (-lambd, 1.0, 0.0)))


PIECES: dict[Any, Callable[..., Pieces]] = {
    aten.relu.default: lambda: _clamp(0.0),
    aten.relu6.default: lambda: _clamp(0.0, 6.0),
    aten.hardtanh.default: lambda min_val=-1.0, max_val=1.0: _clamp(min_val, max_val),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda min: _clamp(min),
    aten.clamp_max.default: lambda max: _clamp(None, max),
    aten.leaky_relu.default: _leaky,
    aten.rrelu.default: _rrelu,
    aten.threshold.default: _threshold,
    aten.hardshrink.default: _hardshrink,
    aten.softshrink.default: _softshrink,
    aten.hardsigmoid.default: lambda: Pieces((-3.0, 3.0), (ZERO, (0.5, 1 / 6, 0.0), constant(1.0))),
    aten.hardswish.default: lambda: Pieces((-3.0, 3.0), (ZERO, (0.0, 0.5, 1 / 6), IDENTITY)),
    aten.abs.default: lambda: _leaky(-1.0),
    aten.sign.default: lambda: Pieces((0.0,), (constant(-1.0), constant(1.0))),
    aten.sgn.default: lambda: Pieces((0.0,), (constant(-1.0), constant(1.0))),
}


# -- functions of several ops


class _NotPiecewiseError(Exception):
    """The function is something else, or of too high a degree."""


Value = Pieces | float


def as_pieces(function: fx.GraphModule) -> Pieces | None:
    """The function of its first argument as a piecewise polynomial, of degree two at most; None if it is not one."""
    env: dict[fx.Node, Any] = {}
    for node in function.graph.nodes:
        if node.op == "placeholder":
            if env:
                return None  # other tensors take part, whose values are known at run time only
            env[node] = Pieces((), (IDENTITY,))
        elif node.op == "output":
            result = env.get(node.args[0])
            return result if isinstance(result, Pieces) else None
        elif node.op != "call_function":
            return None
        else:
            try:
                env[node] = _apply(node, env)
            except _NotPiecewiseError:
                return None
    return None


def _apply(node: fx.Node, env: dict[fx.Node, Any]) -> Value:
    args: Any = map_arg(node.args, env.__getitem__)
    if node.target in PIECES:
        return _compose(PIECES[node.target](*args[1:], **node.kwargs), _lifted(args[0]))
    rule = RULES.get(node.target)
    if rule is None:
        raise _NotPiecewiseError
    return rule(*args, **node.kwargs)


def _lifted(value: Any) -> Pieces:
    if isinstance(value, Pieces):
        return value
    if isinstance(value, (int, float)):
        return Pieces((), (constant(value),))
    raise _NotPiecewiseError


def _zipped(f: Callable[..., Polynomial], *values: Any) -> Pieces:
    """`f` of several functions, piece by piece."""
    lifted = [_lifted(v) for v in values]
    return _on(sorted({k for p in lifted for k in p.knots}), lambda x: f(*(_at(p, x) for p in lifted)))


def _on(knots: list[float], polynomial: Callable[[float], Polynomial]) -> Pieces:
    """The pieces between knots, each from a point inside it; knots at which nothing changes are left out."""
    inside = [0.0]
    if knots:
        inside = [knots[0] - 1, *((a + b) / 2 for a, b in itertools.pairwise(knots)), knots[-1] + 1]
    found = [polynomial(x) for x in inside]
    kept = [i for i in range(len(knots)) if found[i] != found[i + 1]]
    return Pieces(tuple(knots[i] for i in kept), (found[0], *(found[i + 1] for i in kept)))


def _at(pieces: Pieces, x: float) -> Polynomial:
    return pieces.polynomials[sum(x > k for k in pieces.knots)]


def _value(p: Polynomial, x: float) -> float:
    return p[0] + x * (p[1] + x * p[2])


def _sum(a: Polynomial, b: Polynomial, alpha: float = 1) -> Polynomial:
    return (a[0] + alpha * b[0], a[1] + alpha * b[1], a[2] + alpha * b[2])


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    if a[1] * b[2] or a[2] * b[1] or a[2] * b[2]:
        raise _NotPiecewiseError
    return (a[0] * b[0], a[0] * b[1] + a[1] * b[0], a[0] * b[2] + a[1] * b[1] + a[2] * b[0])


def _substituted(outer: Polynomial, inner: Polynomial) -> Polynomial:
    """`outer(inner(x))`"""
    linear = _sum(constant(outer[0]), inner, outer[1])
    return _sum(linear, _product(inner, inner), outer[2]) if outer[2] else linear


def _compose(outer: Pieces, inner: Pieces) -> Pieces:
    knots = _crossings(inner, outer.knots)
    return _on(knots, lambda x: _substituted(_at(outer, _value(_at(inner, x), x)), _at(inner, x)))


def _crossings(pieces: Pieces, levels: tuple[float, ...]) -> list[float]:
    """Its knots, and where it may cross one of the levels."""
    roots = {r for level in levels for p in pieces.polynomials for r in _roots(_sum(p, constant(level), -1))}
    return sorted({*pieces.knots, *roots})


def _roots(p: Polynomial) -> list[float]:
    c, b, a = p
    if not a:
        return [-c / b] if b else []
    inner = b * b - 4 * a * c
    if inner < 0:
        return []
    far = -0.5 * (b + math.copysign(math.sqrt(inner), b))  # the root that loses nothing by cancellation, times a
    return [far / a, c / far] if far else [0.0]


def _compared(compare: Callable[[float, float], bool]) -> Callable[[Any, Any], Pieces]:
    def rule(a: Any, b: Any) -> Pieces:
        difference = _zipped(lambda p, q: _sum(p, q, -1), a, b)
        knots = _crossings(difference, (0.0,))
        return _on(knots, lambda x: constant(compare(_value(_at(difference, x), x), 0.0)))

    return rule


def _add(a: Any, b: Any, alpha: float = 1) -> Pieces:
    return _zipped(lambda p, q: _sum(p, q, alpha), a, b)


def _multiply(a: Any, b: Any) -> Pieces:
    return _zipped(_product, a, b)


def _divide(a: Any, b: Any) -> Pieces:
    if not isinstance(b, (int, float)) or b == 0:
        raise _NotPiecewiseError
    return _multiply(a, 1 / b)


def _choose(condition: Any, a: Any, b: Any) -> Pieces:
    return _zipped(lambda c, p, q: p if c[0] else q, condition, a, b)


def _power(a: Any, exponent: float) -> Pieces:
    if exponent not in (1, 2):
        raise _NotPiecewiseError
    return _lifted(a) if exponent == 1 else _multiply(a, a)


def _cast(a: Any, dtype: Any = None, *_: Any, **settings: Any) -> Any:
    dtype = dtype if isinstance(dtype, torch.dtype) else settings.get("dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise _NotPiecewiseError
    return a


def _logical(combine: Callable[..., bool]) -> Callable[..., Pieces]:
    return lambda *values: _zipped(lambda *p: constant(combine(*(bool(c[0]) for c in p))), *values)


def _filled(value: float) -> Callable[..., Value]:
    return lambda *_, **__: value


_COMPARED = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq}
_COMPARED |= {"ne": operator.ne}
_AND, _OR, _XOR = (_logical(f) for f in (lambda a, b: a and b, lambda a, b: a or b, operator.ne))
_NOT = _logical(operator.not_)

RULES: dict[Any, Callable[..., Any]] = {
    **{getattr(getattr(aten, n), o): _compared(f) for n, f in _COMPARED.items() for o in ("Scalar", "Tensor")},
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _add),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), lambda a, b, alpha=1: _add(a, b, -alpha)),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), lambda a, b, alpha=1: _add(b, a, -alpha)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _multiply),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _divide),
    aten.neg.default: lambda a: _multiply(a, -1.0),
    aten.square.default: lambda a: _multiply(a, a),
    aten.pow.Tensor_Scalar: _power,
    aten.maximum.default: lambda a, b: _choose(RULES[aten.gt.Tensor](a, b), a, b),
    aten.minimum.default: lambda a, b: _choose(RULES[aten.lt.Tensor](a, b), a, b),
    **{getattr(aten.where, o): _choose for o in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
    aten.masked_fill.Scalar: lambda a, mask, value: _choose(mask, value, a),
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor), _AND),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor), _OR),
    **dict.fromkeys((aten.logical_xor.default, aten.bitwise_xor.Tensor, aten.__xor__.Tensor), _XOR),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _NOT),
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default), lambda a, **_: a),
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default), _cast),
    aten.zeros_like.default: _filled(0.0),
    aten.ones_like.default: _filled(1.0),
}
