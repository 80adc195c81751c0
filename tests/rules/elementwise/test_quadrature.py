"""Functions without closed moments, at all scales: smooth ones, ones with a kink, and ones that end."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import propagauss as pg
from propagauss.rules.elementwise.activation import MomentMatched, elementwise
from propagauss.rules.elementwise.quadrature.stretched import Stretched
from propagauss.rules.elementwise.quadrature.sums import BLOCK
from propagauss.rules.elementwise.quadrature.two_scales import two_scales
from rules.elementwise.functions import STRETCHED, grid, integrals, traced

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


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_small_values_with_wide_entries(name: str) -> None:
    """They take one rule with more nodes instead of two."""
    rule = two_scales(traced(ACTIVATIONS[name]), torch.float64)
    assert rule is not None
    m, v = grid(variances=[1e-3, 0.5, 1.9, 2.0, 4.0, 7.8])
    found = rule(m, v)
    torch.testing.assert_close(found, rule.fine(m, v), rtol=0, atol=0)
    expected = integrals(ACTIVATIONS[name], m, v, ())
    for actual, true in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, true, rtol=3e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["tanh", "softsign"])
@pytest.mark.parametrize("variances", [[0.1, 1.0], [0.1, 5.0], [0.1, 50.0]], ids=str)
def test_slopes_are_left_out_where_no_entries_correlate(name: str, variances: list[float]) -> None:
    graph = traced({**ACTIVATIONS, **STRETCHED}[name])
    rule = elementwise(graph, "moments", torch.float64, graph=graph)
    assert isinstance(rule, MomentMatched) and rule.scales is not None
    m, v = grid(variances=variances)
    mean, variance, none = rule.scales(m, v, slope=False)
    assert none is None
    torch.testing.assert_close([mean, variance], list(rule.moments(m, v)[:2]))
    out = rule(pg.Gaussian(m, v))
    torch.testing.assert_close([out.mean, out.variance], [mean, variance])


# -- one kink and any tails


@pytest.mark.parametrize("name", STRETCHED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5e-5), (torch.float32, 2e-4)], ids=str)
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
