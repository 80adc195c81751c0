"""Waiting times with an uncertain rate: the density against the integral, the moments against sums and draws."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm

from propagauss import Gaussian, InputError, fit_laplace
from propagauss.likelihoods import ExponentialLikelihood
from propagauss.likelihoods.exponential import ExponentialLogNormal, log_waiting
from propagauss.metrics import nlpd
from propagauss.predictive.predictor import Predictor

F64 = torch.float64


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize("m", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("v", [1e-4, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("y", [0.0, 1e-6, 0.3, 2.0, 50.0])
def test_density_against_the_integral(m, v, y):
    z = np.linspace(-40, 40, 400_001)  # so fine that the trapezoidal rule is exact to rounding
    f = m + math.sqrt(v) * z
    exact = logsumexp(f - np.exp(f) * y + norm.logpdf(z)) + math.log(z[1] - z[0])
    assert log_waiting(tensor(m), tensor(v), tensor(y)).item() == pytest.approx(exact, abs=1e-6)


def test_density_integrates_to_one_and_has_the_moments():
    predictive = ExponentialLogNormal(tensor(0.5), tensor(0.1))

    def moment(power: int) -> float:
        def integrand(t: float) -> float:  # over t = log y
            return (predictive.log_prob(tensor(t).exp()).exp() * tensor((power + 1) * t).exp()).item()

        return quad(integrand, -30, 8, points=(-2, 0, 2), limit=200)[0]

    assert moment(0) == pytest.approx(1, abs=1e-7)
    assert moment(1) == pytest.approx(predictive.mean.item(), rel=1e-6)
    assert moment(2) - moment(1) ** 2 == pytest.approx(predictive.variance.item(), rel=1e-5)


def test_draws_have_the_moments():
    torch.manual_seed(0)
    predictive = ExponentialLogNormal(tensor(1.0, -2.0), tensor(0.1, 0.05))
    draws = predictive.sample((400_000,))
    assert draws.shape == (400_000, 2) and draws.dtype == F64
    torch.testing.assert_close(draws.mean(0), predictive.mean, rtol=0.01, atol=0)
    torch.testing.assert_close(draws.var(0), predictive.variance, rtol=0.03, atol=0)


def test_gradients():
    m, v = tensor(-1.0, 0.5, 2.0).requires_grad_(), tensor(0.5, 0.2, 1.0).requires_grad_()
    y = tensor(0.0, 0.7, 3.0)  # at no time at all, too
    assert torch.autograd.gradcheck(lambda m, v: log_waiting(m, v, y), (m, v))


def test_times_in_single_precision():
    m, v, y = tensor(-1.0, 0.5, 2.0), tensor(0.5, 0.2, 1.0), tensor(1e-20, 0.7, 3.0)
    single = log_waiting(m.float(), v.float(), y)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), log_waiting(m, v, y), atol=1e-4, rtol=0)


def test_predictor_and_metrics():
    predictor = Predictor(lambda x: Gaussian(x, torch.full_like(x, 0.2)), ExponentialLikelihood(), scale=2.0)
    x, y = torch.randn(5, 2, dtype=F64), torch.rand(5, 2, dtype=F64)
    assert nlpd(predictor(x), y) == pytest.approx(-log_waiting(x, torch.full_like(x, 0.4), y).mean().item())
    assert predictor(x[:0]).mean.shape == (0, 2)
    epistemic, aleatoric = predictor.decompose(x)
    torch.testing.assert_close(epistemic + aleatoric, predictor(x).variance)


@pytest.mark.parametrize("y", [-1.0, math.nan, math.inf])
def test_targets_that_are_no_times_are_refused(y):
    x, times = torch.zeros(2, 1), torch.tensor([[1.0], [y]])
    with pytest.raises(InputError, match="batch 0: likelihood='exponential' needs waiting times"):
        fit_laplace(torch.nn.Linear(1, 1).eval(), [(x, times)], "exponential")
    predictor = Predictor(lambda x: Gaussian(x, torch.ones_like(x)), ExponentialLikelihood())
    with pytest.raises(InputError, match=r"times|finite"):
        predictor.fit_scale([(x, times)], progress=False)
