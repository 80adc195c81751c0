"""Posteriors of another prior precision against a new fit."""

import pytest
import torch
from torch import nn

from propagauss import DiagonalPosterior, PosteriorError, fit_laplace
from propagauss.posteriors.precision import with_prior_precision

torch.set_num_threads(1)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("rows", [5, 200], ids=["few data", "many data"])
def test_as_fitted_with_that_prior(structure, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    data = [(torch.randn(rows, 3, dtype=torch.float64), torch.randint(2, (rows,)))]
    start = fit_laplace(model, data, structure=structure, prior_precision=2.0, progress=False)
    expected = fit_laplace(model, data, structure=structure, prior_precision=0.05, progress=False)
    found = with_prior_precision(start, 0.05)
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-6, atol=1e-9)
    assert found.details["prior_precision"] == 0.05 and start.details["prior_precision"] == 2.0


def test_refusals():
    posterior = DiagonalPosterior({"weight": torch.ones(2, 2)})
    with pytest.raises(PosteriorError, match="does not say which prior precision"):
        with_prior_precision(posterior, 1.0)
    posterior.details = {"prior_precision": 0.5}
    with pytest.raises(PosteriorError, match="positive"):
        with_prior_precision(posterior, -1.0)
