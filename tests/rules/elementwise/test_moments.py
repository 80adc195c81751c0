"""`activation="moments"`: first two moments of `g(x)` and the mean slope `E[g'(x)]`, against numerical integration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import propagauss as pg
from propagauss.nodes import is_assertion
from propagauss.rules.elementwise.activation import MomentMatched, elementwise
from propagauss.rules.elementwise.comparisons import decisions, fusable_comparison
from propagauss.rules.elementwise.moments import MOMENTS
from propagauss.rules.elementwise.pieces import mills, split
from propagauss.rules.elementwise.quadrature.stretched import Stretched
from propagauss.rules.elementwise.quadrature.sums import BLOCK
from propagauss.rules.elementwise.quadrature.two_scales import two_scales
from reference import random_psd
from rules.cases import Call

aten = torch.ops.aten
SAMPLES = 50_000
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
    Function("elu", aten.elu.default, knots=(0.0,)),
    Function("selu", aten.selu.default, knots=(0.0,)),
    Function("celu", aten.celu.default, (1.3,), knots=(0.0,)),
    Function("elu steep", aten.elu.default, (0.7, 1.2, 30.0), knots=(0.0,)),
    Function("elu without", aten.elu.default, (0.0,), knots=(0.0,)),
    Function("celu flat", aten.celu.default, (5.0,), knots=(0.0,)),
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


def test_every_closed_form_is_in_the_table() -> None:
    assert {g.op for g in CLOSED} == set(MOMENTS)


@each
def test_equals_numerical_integration(g: Function) -> None:
    m, v = grid(variances=VARIANCES[:-1] if g.name == "exp" else VARIANCES)
    mean, variance = moments(g, m, v)
    e_mean, e_variance, e_slope = integrals(g, m, v, g.knots)
    tolerance = 1e-6 if g.closed else 1e-4
    size = (e_slope.square() * v + e_variance).sqrt()
    assert ((mean - e_mean).abs() <= tolerance * size + 1e-9 * e_mean.abs() + 1e-12).all()
    torch.testing.assert_close(variance, e_variance, rtol=tolerance, atol=1e-14)
    torch.testing.assert_close(slope(g, m, v), e_slope, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("g", [f for f in CLOSED if not f.smooth], ids=lambda g: g.name)
def test_single_precision_is_exact_for_pieces(g: Function) -> None:
    """From variances that are all but zero to ones against which the whole function is narrow, tails included."""
    means = [-600.0, -31.0, -3.0001, *MEANS, *g.knots, 57.0, 300.0]
    m, v = grid(means, [1e-12, *VARIANCES, 1e4], torch.float32)
    found = rule_of(g, m.dtype).moments(m, v)
    e_mean, e_variance, e_slope = (t.float() for t in integrals(g, m, v, g.knots))
    torch.testing.assert_close(found[0], e_mean, rtol=1e-6, atol=1e-6)
    # what is left are tails of ReLUs, far below the variance that came in
    assert ((found[1] - e_variance).abs() <= 1e-4 * e_variance + 1e-6 * v).all()
    if not g.jumps:
        torch.testing.assert_close(found[2], e_slope, rtol=1e-4, atol=1e-6)


@each
@pytest.mark.parametrize("variance", [1e-8, 1e-6, 1e-4, 1e-2])
def test_single_precision_does_not_cancel(g: Function, variance: float) -> None:
    """Far from kinks the variance is close to `g'(m)² v`, however small; it must not drown in `E[g²] - E[g]²`."""
    bad = (*g.flat, *g.knots)
    means = [m for m in (-2.5, -0.7, 0.4, 1.5, 3.5) if all(abs(m - k) > 6 * variance**0.5 for k in bad)]
    m, v = grid(means, [variance], torch.float32)
    _, actual = moments(g, m, v)
    expected = integrals(g, m, v, g.knots)[1].float()
    # quadrature sees rounded values of `g`: deviations below their last digits cannot be told apart
    rounding = 0.0 if g.closed else 4 * torch.finfo(torch.float32).eps * (1 + g(m).abs()) / expected.sqrt()
    # and where the function is all but constant nothing is left to be right about
    assert ((actual - expected).abs() <= (1e-3 + rounding) * expected + 1e-6 * v).all()


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_zero_variance_is_the_plain_function(g: Function, dtype: torch.dtype) -> None:
    m = torch.tensor([-40.0, -6.0, -0.4, 0.3, 1.4, 5.5, 40.0], dtype=dtype)
    m = m.clamp(max=20) if g.name == "exp" else m
    mean, variance = moments(g, m, torch.zeros_like(m))
    torch.testing.assert_close(mean, g(m))
    rounding = 0.0 if g.closed else 8 * torch.finfo(dtype).eps * g(m).abs()
    assert (variance.sqrt() <= rounding).all()


@each
def test_zero_variance_keeps_the_slope(g: Function) -> None:
    m = torch.tensor([-6.0, -0.4, 0.3, 1.4, 5.5], dtype=torch.float64)
    derivative = torch.func.jvp(g, (m,), (torch.ones_like(m),))[1]
    torch.testing.assert_close(slope(g, m, torch.zeros_like(m)), derivative)


@pytest.mark.parametrize("m", [1e10, -1e10])
@pytest.mark.parametrize("variance", [0.0, 1.0])
@pytest.mark.parametrize("g", [f for f in CLOSED if not f.smooth], ids=lambda g: g.name)
def test_huge_means_stay_finite(g: Function, m: float, variance: float) -> None:
    """The ratio of mean to deviation overflows long before either does."""
    mean = torch.full((1,), m)
    out, second = moments(g, mean, torch.full((1,), variance))
    torch.testing.assert_close(out, g(mean))
    assert second.isfinite().all()


@each
def test_full_structure(g: Function) -> None:
    """Variances as in the diagonal structure, `E[g'_i] C_ij E[g'_j]` off the diagonal, never indefinite."""
    m = torch.tensor([[-1.1, 0.2, 0.9], [0.1, 2.1, -0.3]], dtype=torch.float64)
    c = random_psd(3, 2, 1.0, torch.Generator().manual_seed(0))
    v = c.diagonal(dim1=1, dim2=2)
    out = rule_of(g)(pg.Gaussian(m, covariance=c))
    mean, variance = moments(g, m, v)
    torch.testing.assert_close(out.mean, mean)
    torch.testing.assert_close(out.variance, variance, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(out.covariance, out.covariance.mT)
    assert torch.linalg.eigvalsh(out.covariance).min() >= -1e-12
    e_slope = integrals(g, m.flatten(), v.flatten(), g.knots)[2].reshape(2, 3)
    carried = c * e_slope.unsqueeze(-1) * e_slope.unsqueeze(-2)
    off = ~torch.eye(3, dtype=torch.bool)
    torch.testing.assert_close(out.covariance[:, off], carried[:, off], rtol=1e-4, atol=1e-7)


def test_perfectly_correlated_entries_stay_positive_semidefinite() -> None:
    m = torch.tensor([[0.1, 0.1, -0.2]], dtype=torch.float64)
    c = torch.ones(1, 3, 3, dtype=torch.float64)
    for g in FUNCTIONS:
        out = rule_of(g)(pg.Gaussian(m, covariance=c))
        assert torch.linalg.eigvalsh(out.covariance).min() >= -1e-12, g.name


@each
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_whole_network_agrees_with_monte_carlo(g: Function, structure: str) -> None:
    """Through `streamline`: settings reach the rule, and the moments are those of samples."""
    m = torch.tensor([[-0.8, 0.2, 1.3], [0.1, 2.1, -0.3]], dtype=torch.float64)
    c = random_psd(3, 2, 0.5, torch.Generator().manual_seed(1))
    c = c if structure == "full" else torch.diag_embed(c.diagonal(dim1=1, dim2=2))
    x = pg.Gaussian(m, covariance=c)
    out = pg.streamline(Call(g).eval(), None, x, covariance=structure, activation="moments")(x)
    generator = torch.Generator().manual_seed(0)
    values = g(x.sample((SAMPLES,), generator))
    deviation = values - values.mean(0)
    variance = deviation.square().mean(0)
    # standard errors of a sampled mean and a sampled variance, the latter from the fourth moment
    assert ((out.mean - values.mean(0)).abs() <= 6 * (variance / SAMPLES).sqrt() + 1e-3).all()
    error = ((deviation**4).mean(0) - variance.square()).sqrt() / SAMPLES**0.5
    assert ((out.variance - variance).abs() <= 6 * error + 1e-12).all()


@each
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_gradients(g: Function, structure: str) -> None:
    m = torch.tensor([[-0.8, 0.2], [1.3, -0.1]], dtype=torch.float64)
    c = random_psd(2, 2, 0.5, torch.Generator().manual_seed(2))
    stored = c if structure == "full" else c.diagonal(dim1=1, dim2=2).clone()
    make: Callable[..., pg.Gaussian] = pg.Gaussian.full if structure == "full" else pg.Gaussian.diagonal
    rule = rule_of(g)

    def forward(mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out = rule(make(mean, s))
        return out.mean, out.covariance if structure == "full" else out.variance

    assert torch.autograd.gradcheck(forward, (m.clone().requires_grad_(), stored.clone().requires_grad_()))


@each
def test_gradients_are_finite_without_variance(g: Function) -> None:
    m = torch.tensor([-0.8, 0.2, 1.3], dtype=torch.float64, requires_grad=True)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    out = rule_of(g)(pg.Gaussian.diagonal(m, v))
    for value in (out.mean, out.variance):
        for gradient in torch.autograd.grad(value.sum(), (m, v), retain_graph=True):
            assert gradient.isfinite().all()
    by_variance = torch.autograd.grad(out.variance.sum(), v)[0]
    derivative = torch.func.jvp(g, (m.detach(),), (torch.ones(3, dtype=torch.float64),))[1]
    torch.testing.assert_close(by_variance, derivative.square(), rtol=1e-4, atol=1e-6)


def test_fused_functions_use_quadrature() -> None:
    """`x sigmoid(x)` written out is one function of `x`: the same moments as the single op."""
    x = pg.Gaussian(torch.tensor([[0.3, -1.2]], dtype=torch.float64), torch.tensor([[0.5, 2.0]], dtype=torch.float64))
    pieces = pg.streamline(Call(lambda t: t * torch.sigmoid(t)).eval(), None, x, activation="moments")(x)
    whole = pg.streamline(nn.SiLU().eval(), None, x, activation="moments")(x)
    torch.testing.assert_close(pieces.mean, whole.mean)
    torch.testing.assert_close(pieces.variance, whole.variance)


# -- smooth activations by two rules

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f.__name__: f for f in (torch.tanh, torch.sigmoid, torch.erf, F.gelu, F.silu, F.softplus, F.mish, F.logsigmoid)},
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu written out": lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3)))),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "shifted and scaled": lambda x: 0.3 - 1.7 * torch.sigmoid(x) + x / 3,
    "jump and kink": lambda x: torch.tanh(x) + F.softplus(x),
}
ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "kink": F.elu,
    "slow tails": torch.atan,
    "steep": lambda x: torch.tanh(30 * x),
    "far from zero": lambda x: torch.tanh(x - 50),
    "not straight": lambda x: x * x * torch.sigmoid(x),
    "ends": lambda x: torch.log(1 + torch.sigmoid(x)),
}


STRETCHED: dict[str, Callable[[Tensor], Tensor]] = {
    **{f.__name__: f for f in (F.softsign, torch.atan, torch.asinh)},
    "logarithm": lambda x: torch.log1p(x.abs()),
}


@functools.cache
def moments_at_any_scale(name: str) -> tuple[Tensor, ...]:
    """Means, variances and what is integrated over them, at points that single precision has too."""
    m, v = grid([x / 2 for x in range(-40, 41)], [10 ** (x / 3) for x in range(-18, 13)], torch.float32)
    return m, v, *integrals(ACTIVATIONS[name], m, v, ())


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-4)], ids=str)
def test_smooth_activations_at_any_scale(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Compared with the standard deviation of the argument. In single precision, values of `g` are rounded at 1e-3."""
    g = ACTIVATIONS[name]
    graph = traced(g)
    rule = elementwise(graph, "moments", dtype, graph=graph)
    assert isinstance(rule, MomentMatched) and rule.scales is not None
    m, v, e_mean, e_variance, e_slope = moments_at_any_scale(name)
    m, v = m.to(dtype), v.to(dtype)
    found = [t.double() for t in rule.moments(m, v)]
    size = v.double().sqrt().clamp(max=1.0)
    rounding = 4 * torch.finfo(dtype).eps * (1 + e_mean.abs())
    assert ((found[0] - e_mean).abs() <= tolerance * size + rounding).all()
    assert ((found[1].sqrt() - e_variance.sqrt()).abs() <= tolerance * (e_variance.sqrt() + size) + 8 * rounding).all()
    if dtype == torch.float64:
        close = m.abs() <= 6
        torch.testing.assert_close(found[1][close], e_variance[close], rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(found[2], e_slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_functions_are_left_to_panels(name: str) -> None:
    assert two_scales(traced(ELSEWHERE[name]), torch.float64) is None


def test_wide_and_narrow_entries_do_not_depend_on_each_other() -> None:
    """Where no variance is large, one of the two rules is not run; nor can a mapped function look at variances."""
    rule = two_scales(traced(torch.tanh), torch.float64)
    assert rule is not None
    m, v = grid()
    together = rule(m, v)
    for i, one in enumerate(zip(m, v, strict=True)):
        torch.testing.assert_close(rule(*(t.unsqueeze(0) for t in one)), tuple(t[i : i + 1] for t in together))
    torch.testing.assert_close(torch.vmap(rule)(m, v), together)


# -- functions that are not defined everywhere

ENDING: dict[str, Callable[[Tensor], Tensor]] = {
    **{f.__name__: f for f in (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal)},
    "power": lambda x: x**1.5,
    "quotient": lambda x: 3 / x,
    "shifted": lambda x: torch.log(2 * x - 1e-6),
}


@pytest.mark.parametrize("name", ENDING)
def test_single_precision_close_to_where_a_function_ends(name: str) -> None:
    """Small means are not negative ones, however small the variance: the scale is the distance to zero."""
    g = ENDING[name]
    graph = traced(g)
    rule = elementwise(graph, "moments", torch.float32, graph=graph)
    assert isinstance(rule, MomentMatched)
    m = torch.tensor([1e-5, 1e-3, 0.02, 0.5, 30.0]).repeat(4)
    v = (m * torch.tensor([1e-6, 1e-4, 1e-2, 5e-2]).repeat_interleave(5)).square()
    mean, variance, slope = (t.double() for t in rule.moments(m, v))
    e_mean, e_variance, e_slope = integrals(g, m, v, ())
    torch.testing.assert_close(mean, e_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(variance, e_variance, rtol=2e-3, atol=0.0)
    torch.testing.assert_close(slope, e_slope, rtol=2e-3, atol=0.0)


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


@each_fused
def test_comparisons_are_part_of_the_function(case: Fused) -> None:
    graph = traced(case.function)
    rule = elementwise(graph, "moments", torch.float64, graph=graph)
    assert isinstance(rule, MomentMatched) and (rule.pieces is not None) == case.exact
    m, v = grid([*MEANS, *case.knots])
    mean, variance, slope = rule.moments(m, v)
    e_mean, e_variance, e_slope = integrals(case.function, m, v, case.knots)
    tolerance = 1e-6 if case.exact else 2e-4
    assert ((mean - e_mean).abs() <= tolerance * e_variance.sqrt() + 1e-9 * e_mean.abs() + 1e-12).all()
    torch.testing.assert_close(variance, e_variance, rtol=tolerance, atol=1e-12)
    torch.testing.assert_close(slope, e_slope, rtol=tolerance, atol=1e-5)
    still, none, _ = rule.moments(m, torch.zeros_like(m))
    torch.testing.assert_close(still, case.function(m))
    assert none.abs().max() <= 1e-15


@each_fused
def test_fused_gradients(case: Fused) -> None:
    """Where a function jumps, its moments move with the jump: what is chosen is not constant for derivatives."""
    graph = traced(case.function)
    rule = elementwise(graph, "moments", torch.float64, graph=graph)
    assert isinstance(rule, MomentMatched)
    m = torch.tensor([[-0.8, 0.2], [1.3, -0.1]], dtype=torch.float64, requires_grad=True)
    v = torch.tensor([[0.5, 0.2], [1.1, 2.3]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *at: rule.moments(*at)[:2], (m, v), rtol=3e-3, atol=1e-4)


class Rule(nn.Module):
    """A rule as a network of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor], op: Any = None):
        super().__init__()
        graph = traced(function)
        self.rule = elementwise(graph, "moments", torch.float64, op, graph=graph)

    def forward(self, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.rule.moments(m, v)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["band", "softsign", "gated tanh"])
def test_exported_and_compiled_equal_eager(name: str) -> None:
    """Pieces, panels, and panels whose borders are searched for."""
    (case,) = (c for c in FUSED if c.name == name)
    rule, at = Rule(case.function), grid([-0.8, 0.2, 1.3], [0.0, 0.1, 4.0])
    expected = rule(*at)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(rule, at, dynamic_shapes=({0: batch}, {0: batch}), strict=False).module()
    torch._dynamo.reset()
    compiled = torch.compile(rule, fullgraph=True, backend="eager")
    for found in (exported(*at), compiled(*at)):
        torch.testing.assert_close(found, expected)


def test_limits_that_are_tensors() -> None:
    """They are known at run time only, so that the borders of the panels are computed there."""
    limit = torch.tensor([0.3, -0.4], dtype=torch.float64)
    function = lambda x, t: torch.where(x > 2 * t, x, t)  # noqa: E731
    program = torch.export.export(Call(function), (torch.ones(3, 2, dtype=torch.float64), limit), strict=False)
    graph, env = fx.Graph(), {}
    for node in program.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[list(program.graph.nodes)[-1].args[0][0]])
    module = fx.GraphModule(nn.Module(), graph)
    rule = elementwise(module, "moments", torch.float64, graph=module)
    m = torch.tensor([[0.5, -0.7], [0.1, 0.2], [2.0, -3.0]], dtype=torch.float64)
    v = torch.tensor([[0.2, 0.4], [1.0, 9.0], [1e-3, 4.0]], dtype=torch.float64)
    out = rule(pg.Gaussian(m, v), limit)
    for i, t in enumerate(limit.tolist()):
        e_mean, e_variance, _ = integrals(lambda x, t=t: torch.where(x > 2 * t, x, t), m[:, i], v[:, i], (2 * t,))
        torch.testing.assert_close(out.mean[:, i], e_mean, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(out.variance[:, i], e_variance, rtol=1e-6, atol=1e-12)


# -- PReLU


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("random", [False, True], ids=["fixed slope", "random slope"])
def test_prelu(structure: str, random: bool) -> None:
    """The slope is one per channel; a random one is independent of the input."""
    m = torch.tensor([[[-0.8, 0.2], [1.3, -0.4]], [[0.1, -2.1], [-0.3, 0.0]]], dtype=torch.float64)
    c = random_psd(4, 2, 0.7, torch.Generator().manual_seed(1))
    c = c if structure == "full" else torch.diag_embed(c.diagonal(dim1=1, dim2=2))
    x = (
        pg.Gaussian(m, covariance=c)
        if structure == "full"
        else pg.Gaussian(m, c.diagonal(dim1=1, dim2=2).view(2, 2, 2))
    )
    model = nn.PReLU(2).double().eval()
    model.weight.data = torch.tensor([0.2, 0.6], dtype=torch.float64)
    variance = torch.tensor([0.3, 0.5], dtype=torch.float64)
    posterior = pg.DiagonalPosterior({"weight": variance}) if random else None
    out = pg.streamline(model, posterior, x, covariance=structure, activation="moments")(x)
    generator = torch.Generator().manual_seed(0)
    values = x.sample((4 * SAMPLES,), generator)
    noise = torch.randn(4 * SAMPLES, 1, 2, 1, generator=generator, dtype=torch.float64) * variance.sqrt().view(2, 1)
    slopes = model.weight.detach().view(2, 1) + (noise if random else 0)
    values = torch.where(values > 0, values, slopes * values).flatten(2)
    mean, deviation = values.mean(0), values - values.mean(0)
    sampled = deviation.square().mean(0)
    error = ((deviation**4).mean(0) - sampled.square()).sqrt() / (4 * SAMPLES) ** 0.5
    assert ((out.mean.flatten(1) - mean).abs() <= 6 * (sampled / (4 * SAMPLES)).sqrt()).all()
    assert ((out.variance.flatten(1) - sampled).abs() <= 6 * error).all()
    if structure == "full":
        assert torch.linalg.eigvalsh(out.covariance).min() > 0
        joint = torch.einsum("sbi,sbj->bij", deviation, deviation) / (4 * SAMPLES)
        assert (out.covariance - joint).abs().max() <= 0.1 * joint.abs().max()  # off the diagonal: Hermite's first term


# -- which comparisons are part of a function


def gated(h: Tensor) -> Tensor:
    return h.relu() * (h > 1)


def _comparison(function: Callable[..., Any], *inputs: Tensor) -> list[fx.Node]:
    program = torch.export.export(Call(function), inputs or (torch.ones(2, 3),), strict=False)
    found = decisions(program.graph)
    return [n for n in program.graph.nodes if n in found]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x * (x > 0),
        lambda x: (x > 0).float().sum(1),
        lambda x: torch.where((x > 0) & (x < 1), x.tanh(), 0.0),
        lambda x: x.tanh() * (x.exp() > 2),
        lambda x: torch.where(x > x.tanh(), x, torch.zeros(())),
        lambda x: gated(x.sum(1, keepdim=True) + x),
    ],
)
def test_fusable_comparisons(function: Callable[[Tensor], Tensor]) -> None:
    found = _comparison(function)
    assert found and all(fusable_comparison(node) for node in found)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x > 0,
        lambda x: (x > 0).sum(1),
        lambda x: torch.where(x > 0, x.flip(1), 0.0),
        lambda x: torch.where(x[:, :1] > 0, x, 0.0),
        lambda x: x * (x.sum(1, keepdim=True) > 0),
        lambda x: (x * (x > 0), x > 0),
        lambda x: torch.where((x > 0) & (x.flip(1) > 0), x, 0.0),
    ],
)
def test_other_comparisons(function: Callable[[Tensor], Tensor]) -> None:
    assert not all(fusable_comparison(node) for node in _comparison(function))


def test_comparison_with_another_value() -> None:
    """A value beside the compared one must be certain, which only the caller knows."""
    pair = (torch.ones(2, 3), torch.ones(2, 3))
    (node,) = _comparison(lambda x, y: torch.where(x > 0, x, y), *pair)
    assert not fusable_comparison(node)
    first, other = (n for n in node.graph.nodes if n.op == "placeholder")
    assert fusable_comparison(node, lambda n: n is other)
    assert not fusable_comparison(node, lambda n: n is first)


def test_mills_ratio() -> None:
    """In the written out form of exported graphs, too."""
    u = torch.tensor([0.0, 1e-6, 0.3, 2.0, 20.0, 34.9, 35.1, 70.0, 1e4, 1e8], dtype=torch.float64)
    expected = math.sqrt(math.pi / 2) * torch.special.erfcx(u / math.sqrt(2))
    torch.testing.assert_close(mills(u), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(mills(u[:6]), expected[:6], rtol=1e-12, atol=0)
    exported = torch.export.export(Call(mills), (u,), strict=False).module()(u)  # type: ignore[arg-type]
    torch.testing.assert_close(exported, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", STRETCHED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 3e-4)], ids=str)
def test_one_kink_and_any_tails(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """Between the means and variances that the numbers of nodes were chosen on."""
    g = STRETCHED[name]
    graph = traced(g)
    rule = elementwise(graph, "moments", dtype, graph=graph)
    assert isinstance(rule, MomentMatched) and isinstance(rule.scales, Stretched)
    m, v = grid([x / 1.5 for x in range(-30, 31)], [10 ** (x / 4) for x in range(-24, 17)], dtype)
    mean, variance, slope = (t.double() for t in rule.moments(m, v))
    e_mean, e_variance, e_slope = integrals(g, m, v, (0.0, *(s * 2.0**k for k in range(4, 11) for s in (-1, 1))))
    rounding = 8 * torch.finfo(dtype).eps * (1 + e_mean.abs())
    assert ((mean - e_mean).abs() <= tolerance * e_variance.sqrt() + rounding).all()
    assert ((variance.sqrt() - e_variance.sqrt()).abs() <= tolerance * e_variance.sqrt() + rounding).all()
    size = (e_variance.sqrt() + rounding / tolerance) / v.double().sqrt()
    assert ((slope - e_slope).abs() <= tolerance * size).all()


def test_blocks_of_entries() -> None:
    """Large values are taken in blocks, which changes nothing."""
    graph = traced(STRETCHED["softsign"])
    rule = elementwise(graph, "moments", torch.float64, graph=graph)
    assert isinstance(rule, MomentMatched)
    m = torch.linspace(-3, 3, 2 * BLOCK + 10, dtype=torch.float64).view(2, -1)
    v = m.square() + 0.1
    expected = [torch.stack(each) for each in zip(*(rule.moments(*row) for row in zip(m, v, strict=True)), strict=True)]
    torch.testing.assert_close(list(rule.moments(m, v)), expected)


def test_normal_tails_written_out() -> None:
    """Exported graphs have no error function in double precision; what they have instead is as good."""
    a = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    below, above = split(a)
    torch.testing.assert_close(below, torch.special.log_ndtr(a).exp(), rtol=1e-12, atol=0)
    exported = torch.export.export(Call(split), (a,), strict=False).module()(a)  # type: ignore[arg-type]
    torch.testing.assert_close(exported, (below, above), rtol=1e-10, atol=0)
    assert not torch.equal(exported[0], below)
