"""`activation="moments"`: first two moments of `g(x)` and the mean slope `E[g'(x)]`, against numerical integration."""

from __future__ import annotations

import pytest
import torch

import propagauss as pg
from propagauss.rules.elementwise.moments import MOMENTS
from reference import random_psd
from rules.cases import Call
from rules.elementwise.functions import (
    CLOSED,
    FUNCTIONS,
    MEANS,
    VARIANCES,
    Function,
    each,
    grid,
    integrals,
    moments,
    rule_of,
    slope,
)

SAMPLES = 50_000


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
    rounding = 0.0 if g.closed else 4 * torch.finfo(torch.float32).eps * (1 + g(m).abs()) * expected.sqrt()
    # and where the function is all but constant nothing is left to be right about
    assert ((actual - expected).abs() <= 1e-3 * expected + rounding + 1e-6 * v).all()


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
