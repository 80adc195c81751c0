"""Derivatives of elementwise ops, written out.

They are faster than automatic differentiation, and an exported network that uses them holds ordinary ops only. A
function made of several ops is differentiated by the chain rule over its graph (`with_slope`); a function with an op
that has no entry here is left to `torch.func.jvp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from propagauss.nodes import is_complex
from propagauss.rules.facts import facts, state

aten = torch.ops.aten
Derivative = Callable[..., Tensor]  # (argument, value, *other arguments of the op) -> derivative
Tangent = Any  # a tensor, the number 1.0 for the variable itself, or None for what does not depend on it

# -- functions of one variable


def _gelu(m: Tensor, y: Tensor, approximate: str = "none") -> Tensor:
    return aten.gelu_backward(torch.ones_like(m), m, approximate=approximate)  # one kernel, where the formula takes ten


def _silu(m: Tensor, y: Tensor) -> Tensor:
    s = torch.sigmoid(m)
    return s + y * (1 - s)


def _mish(m: Tensor, y: Tensor) -> Tensor:
    """`y = m t` with `t = tanh(softplus(m))`"""
    t = torch.tanh(nn.functional.softplus(m))
    return t + m * (1 - t * t) * torch.sigmoid(m)


def _softplus(m: Tensor, y: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    return torch.where(m * beta > threshold, 1.0, torch.sigmoid(m * beta))


def _elu(m: Tensor, y: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(m > 0, torch.full_like(m, scale), input_scale * (y + alpha * scale))


def _selu(m: Tensor, y: Tensor) -> Tensor:
    return _elu(m, y, alpha=1.6732632423543772, scale=1.0507009873554805)


def _celu(m: Tensor, y: Tensor, alpha: float = 1) -> Tensor:
    return torch.where(m > 0, torch.ones_like(m), 1 + y / alpha)


def _leaky(m: Tensor, y: Tensor, negative_slope: float = 0.01) -> Tensor:
    return torch.where(m > 0, torch.ones_like(m), torch.full_like(m, negative_slope))


def _rrelu(m: Tensor, y: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any) -> Tensor:
    return _leaky(m, y, (lower + upper) / 2)  # as in evaluation mode


def _hardswish(m: Tensor, y: Tensor) -> Tensor:
    """`m (m + 3) / 6` between -3 and 3"""
    return torch.where(m > 3, torch.ones_like(m), torch.where(m < -3, torch.zeros_like(m), m / 3 + 0.5))


def _hardtanh(m: Tensor, y: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return (m > min_val) & (m < max_val)


def _clamp(m: Tensor, y: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return (m >= (-math.inf if min is None else min)) & (m <= (math.inf if max is None else max))


def _outside(m: Tensor, y: Tensor, lambd: float = 0.5) -> Tensor:
    return m.abs() > lambd


def _power(m: Tensor, y: Tensor, exponent: float) -> Tensor:
    return torch.zeros_like(m) if exponent == 0 else exponent * m ** (exponent - 1)


def _exponential(m: Tensor, y: Tensor, base: float) -> Tensor:
    return y * math.log(base)


# derivatives that are 0 or 1 may be booleans
UNARY: dict[Any, Derivative] = {
    aten.relu.default: lambda m, y: m > 0,
    aten.relu6.default: lambda m, y: (m > 0) & (m < 6),
    aten.hardtanh.default: _hardtanh,
    aten.hardsigmoid.default: lambda m, y: ((m > -3) & (m < 3)).to(m.dtype) / 6,
    aten.hardswish.default: _hardswish,
    aten.hardshrink.default: _outside,
    aten.softshrink.default: _outside,
    aten.threshold.default: lambda m, y, threshold, value: m > threshold,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: lambda m, y, min: m >= min,
    aten.clamp_max.default: lambda m, y, max: m <= max,
    aten.leaky_relu.default: _leaky,
    aten.rrelu.default: _rrelu,
    aten.elu.default: _elu,
    aten.selu.default: _selu,
    aten.celu.default: _celu,
    aten.gelu.default: _gelu,
    aten.silu.default: _silu,
    aten.mish.default: _mish,
    aten.softplus.default: _softplus,
    aten.sigmoid.default: lambda m, y: y * (1 - y),
    aten.log_sigmoid.default: lambda m, y: torch.sigmoid(-m),
    aten.tanh.default: lambda m, y: 1 - y * y,
    aten.sinh.default: lambda m, y: m.cosh(),
    aten.cosh.default: lambda m, y: m.sinh(),
    aten.sin.default: lambda m, y: m.cos(),
    aten.cos.default: lambda m, y: -m.sin(),
    aten.tan.default: lambda m, y: 1 + y * y,
    aten.atan.default: lambda m, y: 1 / (1 + m * m),
    aten.erf.default: lambda m, y: 2 / math.sqrt(math.pi) * torch.exp(-m * m),
    aten.special_ndtr.default: lambda m, y: torch.exp(-0.5 * m * m) / math.sqrt(2 * math.pi),
    aten.exp.default: lambda m, y: y,
    aten.exp2.default: lambda m, y: math.log(2) * y,
    aten.expm1.default: lambda m, y: y + 1,
    aten.log.default: lambda m, y: m.reciprocal(),
    aten.log2.default: lambda m, y: 1 / (math.log(2) * m),
    aten.log10.default: lambda m, y: 1 / (math.log(10) * m),
    aten.log1p.default: lambda m, y: 1 / (1 + m),
    aten.sqrt.default: lambda m, y: 0.5 / y,
    aten.rsqrt.default: lambda m, y: -0.5 * y / m,
    aten.square.default: lambda m, y: 2 * m,
    aten.reciprocal.default: lambda m, y: -y * y,
    aten.pow.Tensor_Scalar: _power,
    aten.abs.default: lambda m, y: m.sign(),
    aten.neg.default: lambda m, y: -torch.ones_like(m),
}
state(*UNARY, elementwise=True)  # PyTorch does not tag all of them so


# -- the chain rule


def _times(tangent: Tangent, factor: Any) -> Tangent:
    if tangent is None:
        return None
    return factor if isinstance(tangent, float) and tangent == 1.0 else tangent * factor


def _sum(first: Tangent, second: Tangent) -> Tangent:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _chosen(y: Tensor, condition: Tensor, first: Tangent, second: Tangent) -> Tensor:
    zero = torch.zeros((), dtype=y.dtype, device=y.device)
    a, b = (zero if t is None else zero + t for t in (first, second))
    return torch.where(condition, a, b)


def _first_if_larger(y: Tensor, a: Any, b: Any, ta: Tangent, tb: Tangent) -> Tensor:
    """The first tangent where `a > b`, else the second; the mean of both where they are equal, as PyTorch has it."""
    share = (a > b).to(y.dtype) + 0.5 * (a == b).to(y.dtype)
    return _sum(_times(ta, share), _times(tb, 1 - share))


# tangents of several arguments: (value, arguments, their tangents, **settings) -> tangent of the value
TANGENTS: dict[Any, Callable[..., Tangent]] = {}


def _register(*ops: Any) -> Callable[[Callable[..., Tangent]], Callable[..., Tangent]]:
    def register(function: Callable[..., Tangent]) -> Callable[..., Tangent]:
        TANGENTS.update(dict.fromkeys(ops, function))
        return function

    return register


@_register(aten.add.Tensor, aten.add.Scalar)
def _add(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...], alpha: float = 1) -> Tangent:
    return _sum(tangents[0], _times(tangents[1], alpha))


@_register(aten.sub.Tensor, aten.sub.Scalar)
def _subtract(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...], alpha: float = 1) -> Tangent:
    return _sum(tangents[0], _times(tangents[1], -alpha))


@_register(aten.rsub.Tensor, aten.rsub.Scalar)
def _reverse_subtract(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...], alpha: float = 1) -> Tangent:
    return _sum(_times(tangents[0], -alpha), tangents[1])


@_register(aten.mul.Tensor, aten.mul.Scalar)
def _multiply(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...]) -> Tangent:
    return _sum(_times(tangents[0], args[1]), _times(tangents[1], args[0]))


@_register(aten.div.Tensor, aten.div.Scalar, torch.div)
def _divide(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...]) -> Tangent:
    divisor = args[1]
    return _sum(_times(tangents[0], 1 / divisor), _times(tangents[1], -y / divisor))


@_register(aten.maximum.default)
def _maximum(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...]) -> Tangent:
    return _first_if_larger(y, *args, *tangents)


@_register(aten.minimum.default)
def _minimum(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...]) -> Tangent:
    return _first_if_larger(y, *reversed(args), *tangents)


@_register(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def _where(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...]) -> Tangent:
    return _chosen(y, args[0], tangents[1], tangents[2])


@_register(aten.pow.Scalar)
def _power_of_number(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...]) -> Tangent:
    return _times(tangents[1], y * math.log(args[0]))


def _reshape(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...], **settings: Any) -> Tangent:
    t = tangents[0]
    return t.expand(args[0].shape).reshape(y.shape) if isinstance(t, Tensor) else t


def _cast(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...], **settings: Any) -> Tangent:
    return tangents[0].to(y.dtype) if isinstance(tangents[0], Tensor) else tangents[0]


@_register(aten.clone.default, aten.alias.default)
def _same(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...], **settings: Any) -> Tangent:
    return tangents[0]


def _unary(derivative: Derivative) -> Callable[..., Tangent]:
    def of_one(y: Tensor, args: tuple[Any, ...], tangents: tuple[Tangent, ...], **settings: Any) -> Tangent:
        return _times(tangents[0], derivative(args[0], y, *args[1:], **settings))

    return of_one


TANGENTS.update({op: _unary(derivative) for op, derivative in UNARY.items()})


def tangent_of(op: Any) -> Callable[..., Tangent] | None:
    """The derivative of an op along tangents of its arguments, if it is known here."""
    known = facts(op)
    return TANGENTS.get(op) or (_reshape if known.keeps_order else _cast if known.casts else None)


def as_slope(y: Tensor, tangent: Tangent) -> Tensor:
    """A tangent as a factor for deviations: a tensor that broadcasts to `y`."""
    return tangent.to(y.dtype) if isinstance(tangent, Tensor) else torch.full_like(y, tangent)


def partial_slope(op: Any, y: Tensor, args: tuple[Any, ...], at: int) -> Tensor | None:
    """`∂op/∂args[at]`, if it is known here; `y` is the value of the op."""
    rule = TANGENTS.get(op)  # no facts: this runs while a network does, also under torch.compile
    if rule is None:
        return None
    return as_slope(y, rule(y, args, tuple(1.0 if i == at else None for i in range(len(args)))))


def with_slope(function: fx.GraphModule) -> fx.GraphModule | None:
    """From `f(x, *rest)`, elementwise in x, `(f, ∂f/∂x)`; None if it has an op without an entry here."""
    if any(map(is_complex, function.graph.nodes)):  # the derivatives here are those of real functions
        return None
    graph, env = fx.Graph(), {}
    tangents: dict[fx.Node, Any] = {}
    for node in function.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.placeholder(node.name)
            if not tangents:
                tangents[node] = 1.0
        elif node.op == "output":
            value = node.args[0]
            slope = graph.call_function(as_slope, (env[value], tangents[value]))
            graph.output((env[value], slope))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
            if facts(node.target).compares or not any(a in tangents for a in node.all_input_nodes):
                continue
            rule, given = tangent_of(node.target), [a for a in node.args if isinstance(a, fx.Node)]
            if rule is None or any(a in tangents and a not in given for a in node.all_input_nodes):
                return None
            each = tuple(tangents.get(a) if isinstance(a, fx.Node) else None for a in node.args)
            args = map_arg(node.args, env.__getitem__)
            tangents[node] = graph.call_function(rule, (env[node], args, each), map_arg(node.kwargs, env.__getitem__))
    return fx.GraphModule(function, graph)
