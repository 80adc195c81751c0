"""Counts with an uncertain rate: the density against the integral, the moments against sums."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm, poisson

from propagauss import Gaussian, InputError, fit_laplace
from propagauss.likelihoods import PoissonLikelihood
from propagauss.likelihoods.poisson import PoissonLogNormal, log_density
from propagauss.metrics import nlpd
from propagauss.predictive.predictor import Predictor

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize("m", [-3.0, 0.0, 3.0, 6.0])
@pytest.mark.parametrize("v", [1e-4, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("y", [0, 1, 10, 300])
def test_density_against_the_integral(m, v, y):
    z = np.linspace(-40, 40, 400_001)  # so fine that the trapezoidal rule is exact to rounding
    f = m + math.sqrt(v) * z
    log_integrand = poisson.logpmf(y, np.exp(f)) + norm.logpdf(z)
    exact = logsumexp(log_integrand) + math.log(z[1] - z[0])
    found = log_density(tensor(m), tensor(v), tensor(y)).item()
    assert found == pytest.approx(exact, abs=1e-6)


def test_probabilities_add_up_and_have_the_moments():
    predictive = PoissonLogNormal(tensor(1.0, 2.0), tensor(0.3, 0.05))
    y = torch.arange(3000, dtype=F64)[:, None]
    p = predictive.log_prob(y).exp()
    torch.testing.assert_close(p.sum(0), torch.ones(2, dtype=F64), atol=1e-9, rtol=0)
    torch.testing.assert_close((p * y).sum(0), predictive.mean, atol=1e-6, rtol=0)
    torch.testing.assert_close((p * y**2).sum(0) - predictive.mean**2, predictive.variance, atol=1e-4, rtol=0)


def test_draws_have_the_moments():
    torch.manual_seed(0)
    predictive = PoissonLogNormal(tensor(1.0, 2.0), tensor(0.3, 0.05))
    draws = predictive.sample((400_000,))
    assert draws.shape == (400_000, 2) and draws.dtype == F64
    torch.testing.assert_close(draws.mean(0), predictive.mean, rtol=0.01, atol=0)
    torch.testing.assert_close(draws.var(0), predictive.variance, rtol=0.03, atol=0)


@pytest.mark.parametrize("v", [0.0, 0.5])
def test_gradients(v):
    m, y = tensor(-1.0, 0.5, 2.0).requires_grad_(), tensor(0, 2, 9)
    variance = torch.full_like(m, v).requires_grad_()
    if v:
        assert torch.autograd.gradcheck(log_density, (m, variance, y))
        return
    density = log_density(m, variance, y).exp().sum()
    _, gradient = torch.autograd.grad(density, (m, variance))
    second = torch.func.hessian(lambda m: (y * m - m.exp() - torch.lgamma(y + 1)).exp().sum())(m.detach()).diagonal()
    torch.testing.assert_close(gradient, second / 2, atol=1e-6, rtol=0)  # d/dv E[g] = ½ g'' where v is 0


def test_counts_of_any_dtype():
    single = log_density(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([3]))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), log_density(tensor(1.0), tensor(0.5), tensor(3)), atol=1e-5, rtol=0)


def test_predictor_and_metrics():
    predictor = Predictor(lambda x: Gaussian(x, torch.full_like(x, 0.2)), PoissonLikelihood(), scale=2.0)
    x, y = torch.randn(5, 2, dtype=F64), torch.arange(10).reshape(5, 2)
    assert nlpd(predictor(x), y) == pytest.approx(-log_density(x, torch.full_like(x, 0.4), y).mean().item())
    assert predictor(x[:0]).mean.shape == (0, 2)
    epistemic, aleatoric = predictor.decompose(x)
    torch.testing.assert_close(epistemic + aleatoric, predictor(x).variance)


@pytest.mark.parametrize("y", [-1.0, 0.5, math.nan, math.inf])
def test_targets_that_are_no_counts_are_refused(y):
    x, counts = torch.zeros(2, 1), torch.tensor([[1.0], [y]])
    with pytest.raises(InputError, match="batch 0: likelihood='poisson' needs counts"):
        fit_laplace(torch.nn.Linear(1, 1).eval(), [(x, counts)], "poisson")
    predictor = Predictor(lambda x: Gaussian(x, torch.ones_like(x)), PoissonLikelihood())
    with pytest.raises(InputError, match=r"counts|finite"):
        predictor.fit_scale([(x, counts)], progress=False)
