"""`activation="moments"`: first two moments of `g(x)` and the mean slope `E[g'(x)]`, against numerical integration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from propagauss.rules.activation import elementwise
from propagauss.rules.moments import MOMENTS, quadrature
from reference import random_psd
from rules.cases import Call

aten = torch.ops.aten
SAMPLES = 50_000
MEANS = [-6.0, -1.7, -0.4, 0.0, 0.3, 1.1, 2.9, 6.2]
VARIANCES = [1e-8, 1e-4, 0.04, 0.5, 3.0]


@dataclass(frozen=True)
class Function:
    """An elementwise op with its settings; `smooth` ones are infinitely differentiable."""

    name: str
    op: Any
    args: tuple[Any, ...] = ()
    smooth: bool = True
    flat: tuple[float, ...] = field(default=())  # means where the slope vanishes or jumps

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x, *self.args)

    @property
    def closed(self) -> bool:
        return self.op in MOMENTS


CLOSED = [
    Function("relu", aten.relu.default, smooth=False, flat=(0.0,)),
    Function("leaky_relu", aten.leaky_relu.default, smooth=False, flat=(0.0,)),
    Function("leaky_relu steep", aten.leaky_relu.default, (0.3,), smooth=False, flat=(0.0,)),
    Function("hardtanh", aten.hardtanh.default, smooth=False, flat=(-1.0, 1.0)),
    Function("hardtanh lopsided", aten.hardtanh.default, (-0.5, 2.0), smooth=False, flat=(-0.5, 2.0)),
    Function("relu6", aten.relu6.default, smooth=False, flat=(0.0, 6.0)),
    Function("abs", aten.abs.default, smooth=False, flat=(0.0,)),
    Function("exp", aten.exp.default),
    Function("sin", aten.sin.default, flat=(math.pi / 2, -math.pi / 2)),
    Function("cos", aten.cos.default, flat=(0.0, math.pi, -math.pi)),
    Function("square", aten.square.default, flat=(0.0,)),
]
BY_QUADRATURE = [
    Function("gelu", aten.gelu.default),
    Function("silu", aten.silu.default),
    Function("tanh", aten.tanh.default),
    Function("sigmoid", aten.sigmoid.default),
    Function("softplus", aten.softplus.default),
    Function("elu", aten.elu.default, smooth=False),
]
FUNCTIONS = [*CLOSED, *BY_QUADRATURE]
each = pytest.mark.parametrize("g", FUNCTIONS, ids=lambda g: g.name)


def moments(g: Function, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance as the rule gives them."""
    out = elementwise(g, "moments", m.dtype, g.op, (g.args, {}))(pg.Gaussian(m, v))
    return out.mean, out.variance


def slope(g: Function, m: Tensor, v: Tensor) -> Tensor:
    """`E[g'(x)]`, which the full structure multiplies covariances by."""
    if g.closed:
        return MOMENTS[g.op](m, v, *g.args)[2]
    module = elementwise(g, "moments", m.dtype, g.op, (g.args, {}))
    return quadrature(g, m, v, module.nodes, module.weights)[2]


def grid(means: list[float] = MEANS, variances: list[float] = VARIANCES, dtype: torch.dtype = torch.float64) -> Any:
    m, v = torch.meshgrid(torch.tensor(means, dtype=dtype), torch.tensor(variances, dtype=dtype), indexing="ij")
    return m.flatten(), v.flatten()


def integrals(g: Function, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`E[g]`, `Var[g]` and `E[g']` by a dense trapezoid rule; values are taken from `g(m)` so that nothing cancels."""
    z = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z * z) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    m, s = m.double().unsqueeze(-1), v.double().sqrt().unsqueeze(-1)
    at = (m + s * z).requires_grad_()
    values = g(at)
    (gradient,) = torch.autograd.grad(values.sum(), at)
    deviation = values.detach() - g(m)
    shift = (weight * deviation).sum(-1)
    variance = (weight * deviation.square()).sum(-1) - shift.square()
    return g(m).squeeze(-1) + shift, variance, (weight * gradient).sum(-1)


def test_every_closed_form_is_in_the_table() -> None:
    assert {g.op for g in CLOSED} == set(MOMENTS)


@each
def test_equals_numerical_integration(g: Function) -> None:
    m, v = grid()
    mean, variance = moments(g, m, v)
    e_mean, e_variance, e_slope = integrals(g, m, v)
    # quadrature converges slowly at a kink, even one in the second derivative
    tolerance = 1e-5 if g.closed else 1e-4 if g.smooth else 5e-3
    size = (e_slope.square() * v + e_variance).sqrt()
    assert ((mean - e_mean).abs() <= tolerance * size + 1e-9 * e_mean.abs() + 1e-12).all()
    torch.testing.assert_close(variance, e_variance, rtol=tolerance, atol=1e-15)
    assert ((slope(g, m, v) - e_slope).abs() <= max(tolerance, 1e-3) * (1 + e_slope.abs())).all()


@each
@pytest.mark.parametrize("variance", [1e-8, 1e-6, 1e-4, 1e-2])
def test_single_precision_does_not_cancel(g: Function, variance: float) -> None:
    """Far from kinks the variance is close to `g'(m)² v`, however small; it must not drown in `E[g²] - E[g]²`."""
    means = [m for m in (-2.5, -0.7, 0.4, 1.5, 3.5) if all(abs(m - k) > 6 * variance**0.5 for k in g.flat)]
    m, v = grid(means, [variance], torch.float32)
    _, actual = moments(g, m, v)
    expected = integrals(g, m, v)[1].float()
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
    out, spread = moments(g, mean, torch.full((1,), variance))
    torch.testing.assert_close(out, g(mean))
    assert spread.isfinite().all()


@each
def test_full_structure(g: Function) -> None:
    """Variances as in the diagonal structure, `E[g'_i] C_ij E[g'_j]` off the diagonal, never indefinite."""
    m = torch.tensor([[-1.1, 0.2, 0.9], [0.1, 2.1, -0.3]], dtype=torch.float64)
    c = random_psd(3, 2, 1.0, torch.Generator().manual_seed(0))
    v = c.diagonal(dim1=1, dim2=2)
    out = elementwise(g, "moments", m.dtype, g.op, (g.args, {}))(pg.Gaussian(m, covariance=c))
    mean, variance = moments(g, m, v)
    torch.testing.assert_close(out.mean, mean)
    torch.testing.assert_close(out.variance, variance, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(out.covariance, out.covariance.mT)
    assert torch.linalg.eigvalsh(out.covariance).min() >= -1e-12
    e_slope = integrals(g, m.flatten(), v.flatten())[2].reshape(2, 3)
    carried = c * e_slope.unsqueeze(-1) * e_slope.unsqueeze(-2)
    off = ~torch.eye(3, dtype=torch.bool)
    torch.testing.assert_close(out.covariance[:, off], carried[:, off], rtol=1e-3, atol=1e-5)


def test_perfectly_correlated_entries_stay_positive_semidefinite() -> None:
    m = torch.tensor([[0.1, 0.1, -0.2]], dtype=torch.float64)
    c = torch.ones(1, 3, 3, dtype=torch.float64)
    for g in FUNCTIONS:
        out = elementwise(g, "moments", m.dtype, g.op, (g.args, {}))(pg.Gaussian(m, covariance=c))
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
    slack = 0.0 if g.closed or g.smooth else 5e-3
    assert ((out.variance - variance).abs() <= 6 * error + slack * variance).all()


@each
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_gradients(g: Function, structure: str) -> None:
    m = torch.tensor([[-0.8, 0.2], [1.3, -0.1]], dtype=torch.float64)
    c = random_psd(2, 2, 0.5, torch.Generator().manual_seed(2))
    spread = c if structure == "full" else c.diagonal(dim1=1, dim2=2).clone()
    make: Callable[..., pg.Gaussian] = pg.Gaussian.full if structure == "full" else pg.Gaussian.diagonal
    rule = elementwise(g, "moments", m.dtype, g.op, (g.args, {}))

    def forward(mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out = rule(make(mean, s))
        return out.mean, out.covariance if structure == "full" else out.variance

    assert torch.autograd.gradcheck(forward, (m.clone().requires_grad_(), spread.clone().requires_grad_()))


@each
def test_gradients_are_finite_without_variance(g: Function) -> None:
    m = torch.tensor([-0.8, 0.2, 1.3], dtype=torch.float64, requires_grad=True)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    out = elementwise(g, "moments", m.dtype, g.op, (g.args, {}))(pg.Gaussian.diagonal(m, v))
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
