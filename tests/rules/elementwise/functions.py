"""Elementwise functions, the rules for their moments, and numerical integrals to compare them with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import propagauss as pg
from propagauss.nodes import is_assertion
from propagauss.rules.elementwise.activation import MomentMatched, elementwise
from propagauss.rules.elementwise.moments import MOMENTS
from rules.cases import Call

aten = torch.ops.aten
MEANS = [-6.0, -1.7, -0.4, 0.0, 0.3, 1.1, 2.9, 6.2]
VARIANCES = [1e-8, 1e-6, 1e-4, 0.04, 0.5, 3.0, 100.0]


@dataclass(frozen=True)
class Function:
    """An elementwise op with its settings; `smooth` ones are infinitely differentiable."""

    name: str
    op: Any
    args: tuple[Any, ...] = ()
    knots: tuple[float, ...] = ()  # where it is not smooth
    flat: tuple[float, ...] = ()  # means where the slope vanishes
    jumps: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x, *self.args)

    @property
    def closed(self) -> bool:
        return self.op in MOMENTS

    @property
    def smooth(self) -> bool:
        return not self.knots


CLOSED = [
    Function("relu", aten.relu.default, knots=(0.0,)),
    Function("leaky_relu", aten.leaky_relu.default, knots=(0.0,)),
    Function("leaky_relu steep", aten.leaky_relu.default, (0.3,), knots=(0.0,)),
    Function("rrelu", aten.rrelu.default, knots=(0.0,)),
    Function("hardtanh", aten.hardtanh.default, knots=(-1.0, 1.0)),
    Function("hardtanh lopsided", aten.hardtanh.default, (-0.5, 2.0), knots=(-0.5, 2.0)),
    Function("relu6", aten.relu6.default, knots=(0.0, 6.0)),
    Function("clamp", aten.clamp.default, (-1.125, 0.875), knots=(-1.125, 0.875)),
    Function("clamp below", aten.clamp.default, (-1.125, None), knots=(-1.125,)),
    Function("clamp above", aten.clamp.default, (None, 0.875), knots=(0.875,)),
    Function("clamp_min", aten.clamp_min.default, (-0.4375,), knots=(-0.4375,)),
    Function("clamp_max", aten.clamp_max.default, (0.375,), knots=(0.375,)),
    Function("threshold", aten.threshold.default, (0.125, 20.0), knots=(0.125,), jumps=True),
    Function("hardshrink", aten.hardshrink.default, (0.625,), knots=(-0.625, 0.625), jumps=True),
    Function("softshrink", aten.softshrink.default, (0.625,), knots=(-0.625, 0.625)),
    Function("hardsigmoid", aten.hardsigmoid.default, knots=(-3.0, 3.0)),
    Function("hardswish", aten.hardswish.default, knots=(-3.0, 3.0), flat=(-1.5,)),
    Function("abs", aten.abs.default, knots=(0.0,)),
    Function("sign", aten.sign.default, knots=(0.0,), jumps=True),
    Function("sgn", aten.sgn.default, knots=(0.0,), jumps=True),
    Function("exp", aten.exp.default),
    Function("sin", aten.sin.default, flat=(math.pi / 2, -math.pi / 2)),
    Function("cos", aten.cos.default, flat=(0.0, math.pi, -math.pi)),
    Function("square", aten.square.default, flat=(0.0,)),
]
BY_QUADRATURE = [
    Function("gelu", aten.gelu.default),
    Function("silu", aten.silu.default),
    Function("mish", aten.mish.default),
    Function("tanh", aten.tanh.default),
    Function("sigmoid", aten.sigmoid.default),
    Function("log_sigmoid", aten.log_sigmoid.default),
    Function("softplus", aten.softplus.default),
    Function("softplus steep", aten.softplus.default, (2.0,)),
    Function("erf", aten.erf.default),
    Function("atan", aten.atan.default),
    Function("elu", aten.elu.default, knots=(0.0,)),
    Function("selu", aten.selu.default, knots=(0.0,)),
    Function("celu", aten.celu.default, (1.3,), knots=(0.0,)),
    Function("celu steep", aten.celu.default, (0.05,), knots=(0.0,)),
    Function("elu without", aten.elu.default, (0.0,), knots=(0.0,)),
    Function("celu flat", aten.celu.default, (5.0,), knots=(0.0,)),
]
FUNCTIONS = [*CLOSED, *BY_QUADRATURE]
each = pytest.mark.parametrize("g", FUNCTIONS, ids=lambda g: g.name)


def traced(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    """A function of one variable as the rewriter has it: a graph of ATen ops."""
    program = torch.export.export(Call(function), (torch.ones(2, 3, dtype=torch.float64),), strict=False)
    graph, env = fx.Graph(), {}
    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(env[node.args[0][0]])
        elif not is_assertion(node.target):
            env[node] = graph.node_copy(node, env.__getitem__)
    return fx.GraphModule(nn.Module(), graph)


def rule_of(g: Function, dtype: torch.dtype = torch.float64) -> MomentMatched:
    module = elementwise(g, "moments", dtype, g.op, (g.args, {}), None if g.closed else traced(g))
    assert isinstance(module, MomentMatched)
    return module


def moments(g: Function, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance as the rule gives them."""
    out = rule_of(g, m.dtype)(pg.Gaussian(m, v))
    return out.mean, out.variance


def slope(g: Function, m: Tensor, v: Tensor) -> Tensor:
    """`E[g'(x)]`, which the full structure multiplies covariances by."""
    return rule_of(g, m.dtype).moments(m, v)[2]


def grid(means: list[float] = MEANS, variances: list[float] = VARIANCES, dtype: torch.dtype = torch.float64) -> Any:
    m, v = torch.meshgrid(torch.tensor(means, dtype=dtype), torch.tensor(variances, dtype=dtype), indexing="ij")
    return m.flatten(), v.flatten()


def integrals(
    g: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, knots: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """`E[g]`, `Var[g]` and `Cov(x, g)/v` by many short panels, in double precision; deviations from `g(m)`."""
    nodes, weights = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(20))
    m, s = m.double().unsqueeze(-1), v.double().sqrt().unsqueeze(-1)
    fine = torch.linspace(-13, 13, 53, dtype=torch.float64).expand(len(m), -1)
    close = (torch.cat([torch.tensor(knots), torch.linspace(-8, 8, 17)]).double() - m) / s
    borders = torch.cat([fine, close.clamp(-13, 13)], 1).sort(1).values
    z = (borders[:, :-1, None] + borders.diff()[..., None] * (nodes + 1) / 2).flatten(1)
    mass = (borders.diff()[..., None] * weights / 2).flatten(1) * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    deviation = g(m + s * z) - g(m)
    shift = (mass * deviation).sum(-1, keepdim=True)
    deviation = deviation - shift
    slopes = (mass * z * deviation).sum(-1) / s.squeeze(-1)
    return (g(m) + shift).squeeze(-1), (mass * deviation.square()).sum(-1), slopes


STRETCHED: dict[str, Callable[[Tensor], Tensor]] = {
    **{f.__name__: f for f in (nn.functional.softsign, torch.atan, torch.asinh)},
    "logarithm": lambda x: torch.log1p(x.abs()),
}


# -- functions of several ops, comparisons among them


@dataclass(frozen=True)
class Fused:
    name: str
    function: Callable[[Tensor], Tensor]
    knots: tuple[float, ...]
    exact: bool = True  # a piecewise polynomial, and recognised as one


FUSED = [
    Fused("where", lambda x: torch.where(x > 0, x, 0.0), (0.0,)),
    Fused("where the other way", lambda x: torch.where(x <= 0, 0.0, x), (0.0,)),
    Fused("gate", lambda x: x * (x > 0), (0.0,)),
    Fused("cast gate", lambda x: (x > 0).to(x.dtype) * x, (0.0,)),
    Fused("maximum", lambda x: torch.maximum(x, torch.zeros_like(x)), (0.0,)),
    Fused("masked", lambda x: 3 * x.masked_fill(x < 0, 0.5), (0.0,)),
    Fused("scaled clamp", lambda x: (2 * x - 1).clamp(min=0) * 2, (0.5,)),
    Fused("squared relu", lambda x: x.relu().square(), (0.0,)),
    Fused("band", lambda x: torch.where((x > 0) & (2 * x - 1 < 1), x * x, 0.0), (0.0, 1.0)),
    Fused("outside", lambda x: x * (x.abs() > 0.5), (-0.5, 0.5)),
    Fused("outside by squares", lambda x: x * (x * x > 2), (-(2**0.5), 2**0.5)),
    Fused("neither", lambda x: torch.where(~((x > 1) | (x < -0.3)), x, -x), (-0.3, 1.0)),
    Fused("product of gates", lambda x: x.clamp(min=-1) * torch.sign(x + 3), (-3.0, -1.0)),
    Fused("elu in pieces", lambda x: torch.where(x > 0, x, torch.expm1(x)), (0.0,), exact=False),
    Fused("softsign", lambda x: x / (1 + x.abs()), (0.0,), exact=False),
    Fused("shifted tanh", lambda x: x * torch.tanh(3 * x - 5), (), exact=False),
    Fused("gated tanh", lambda x: torch.tanh(x) * (x.abs() > 0.5), (-0.5, 0.5), exact=False),
    Fused("by another function", lambda x: torch.where(torch.tanh(x) > 0.3, 2.0, x), (math.atanh(0.3),), exact=False),
    Fused("maximum of two", lambda x: torch.maximum(torch.sin(x / 9), x), (0.0,), exact=False),
]
each_fused = pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
