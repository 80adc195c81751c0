"""Prior precision and noise by the marginal likelihood."""

import pytest
import torch
from torch import nn

from posteriors.laplace.models import loader, make, targets
from propagauss.posteriors import fit_laplace
from propagauss.posteriors.laplace.evidence import Evidence


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_chosen_hyperparameters_beat_a_grid(structure):
    model, x = make("mlp")
    data = loader(x, targets("regression"))

    def evidence(delta, sigma):
        fixed = fit_laplace(model, data, "regression", structure, prior_precision=delta, noise=sigma)
        return fixed.details["log_marginal_likelihood"]

    free = fit_laplace(model, data, "regression", structure).details
    assert evidence(free["prior_precision"], free["noise"]) == pytest.approx(free["log_marginal_likelihood"])
    factors = [0.1, 0.5, 0.9, 0.999, 1, 1.001, 1.1, 2, 10]
    best = max(evidence(free["prior_precision"] * i, free["noise"] * j) for i in factors for j in factors)
    assert best <= free["log_marginal_likelihood"] + 1e-9
    half = fit_laplace(model, data, "regression", structure, prior_precision=free["prior_precision"]).details
    assert half["noise"] == pytest.approx(free["noise"], rel=1e-3)
    half = fit_laplace(model, data, "regression", structure, noise=free["noise"]).details
    assert half["prior_precision"] == pytest.approx(free["prior_precision"], rel=1e-3)


def test_marginal_likelihood_of_a_linear_model_is_the_exact_one():
    """Bayesian linear regression at its MAP: the Laplace evidence is log N(y; 0, X Xᵀ / δ + σ² I)."""
    torch.manual_seed(0)
    x, y, delta, sigma = torch.randn(20, 3).double(), torch.randn(20, 1).double(), 0.8, 0.5
    model = nn.Linear(3, 1, bias=False).double().eval()
    precision = x.T @ x / sigma**2 + delta * torch.eye(3).double()
    model.weight.data = torch.linalg.solve(precision, x.T @ y / sigma**2).T
    posterior = fit_laplace(model, [(x, y)], "regression", "full", prior_precision=delta, noise=sigma)
    marginal = x @ x.T / delta + sigma**2 * torch.eye(20).double()
    exact = torch.distributions.MultivariateNormal(torch.zeros(20).double(), marginal).log_prob(y[:, 0])
    assert posterior.details["log_marginal_likelihood"] == pytest.approx(exact.item())
    torch.testing.assert_close(posterior.to_dense(), torch.linalg.inv(precision))


def test_evidence_without_a_maximum_warns():
    flat = Evidence(eigenvalues=torch.zeros(3).numpy(), squared_norm=1.0, loss=0.0)
    with pytest.warns(UserWarning, match="give prior_precision="):
        flat.maximise(None, 1.0)
