"""The full Laplace fit, with more and with fewer parameters than data times outputs, against its dense form."""

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from posteriors.cases import Largest
from propagauss.baselines import GLM, MonteCarlo
from propagauss.posteriors import SpectralPosterior, memory
from propagauss.posteriors.laplace.evidence import Evidence

DELTA, SIGMA = 0.3, 0.5


def problem(likelihood: str, points: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """77 parameters and two outputs: the rows of 15 points are few, those of 60 are many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 11), nn.Tanh(), nn.Linear(11, 2, bias=False)).to(dtype).eval()
    x = torch.randn(points, 4, dtype=dtype)
    y = torch.randint(2, (points,)) if likelihood == "classification" else torch.randn(points, 2, dtype=dtype)
    return model, x, y


def dense_curvature(model: nn.Module, x: Tensor, likelihood: str) -> Tensor:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    j = torch.cat([g.flatten(2) for g in jacobian.values()], -1)  # [n, 2, P]
    hessian = torch.eye(2, dtype=x.dtype).expand(len(x), 2, 2)
    if likelihood == "classification":
        p = model(x).detach().softmax(-1)
        hessian = p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)
    return torch.einsum("ncp,ncd,ndq->pq", j, hessian, j)


many = pytest.mark.parametrize("points", [1, 15, 60])
likelihoods = pytest.mark.parametrize("likelihood", ["classification", "regression"])


@many
@likelihoods
def test_full_fit_is_the_inverse_of_the_dense_precision(likelihood: str, points: int) -> None:
    model, x, y = problem(likelihood, points)
    noise = {"noise": SIGMA} if likelihood == "regression" else {}
    posterior = pg.fit_laplace(model, [(x, y)], likelihood, "full", prior_precision=DELTA, **noise)  # type: ignore[arg-type]
    assert isinstance(posterior, SpectralPosterior) and posterior._matrix.shape == (77, min(2 * points, 77))
    h = dense_curvature(model, x, likelihood)
    precision = h / noise.get("noise", 1.0) ** 2 + DELTA * torch.eye(77, dtype=h.dtype)
    torch.testing.assert_close(posterior.to_dense(), torch.linalg.inv(precision), rtol=1e-10, atol=1e-12)


@many
@likelihoods
@pytest.mark.filterwarnings("ignore:the marginal likelihood has no maximum")
def test_marginal_likelihood_is_that_of_the_dense_form(likelihood: str, points: int) -> None:
    model, x, y = problem(likelihood, points)
    h = torch.linalg.eigvalsh(dense_curvature(model, x, likelihood)).clamp(min=0)
    squared_norm = sum(p.square().sum().item() for p in model.parameters())
    if likelihood == "classification":
        loss, targets = nn.functional.cross_entropy(model(x), y, reduction="sum").item(), 0
    else:
        loss, targets = 0.5 * (model(x) - y).square().sum().item(), y.numel()
    expected = Evidence(h.numpy(), squared_norm, loss, targets)
    details = pg.fit_laplace(model, [(x, y)], likelihood, "full").details  # type: ignore[arg-type]
    delta, sigma = expected.maximise(None, None if targets else 1.0)
    assert details["prior_precision"] == pytest.approx(delta, rel=1e-5)
    assert details.get("noise", 1.0) == pytest.approx(sigma, rel=1e-5)
    assert details["log_marginal_likelihood"] == pytest.approx(expected.log_marginal_likelihood(delta, sigma), rel=1e-9)


def test_rows_that_depend_on_each_other() -> None:
    """The same point many times: singular values of zero, for which no direction stands out."""
    model, x, y = problem("regression", 1)
    x, y = x.expand(15, -1), y.expand(15, -1)
    posterior = pg.fit_laplace(model, [(x, y)], "regression", "full", prior_precision=DELTA, noise=SIGMA)
    h = dense_curvature(model, x, "regression")
    precision = h / SIGMA**2 + DELTA * torch.eye(77, dtype=h.dtype)
    torch.testing.assert_close(posterior.to_dense(), torch.linalg.inv(precision), rtol=1e-10, atol=1e-12)


# -- what it is used for


@many
def test_predictions_are_those_of_the_dense_covariance(points: int) -> None:
    model, x, y = problem("regression", points)
    fitted = pg.fit_laplace(model, [(x, y)], "regression", "full", prior_precision=DELTA, noise=SIGMA)
    assert isinstance(fitted, SpectralPosterior)
    dense = pg.FullPosterior(fitted.names, fitted.to_dense())
    new = torch.randn(5, 4, dtype=torch.float64)
    one, other = (pg.streamline(model, p, new[:2], covariance="full")(new) for p in (fitted, dense))
    torch.testing.assert_close(one.covariance, other.covariance)
    torch.testing.assert_close(GLM(model, fitted)(new).covariance, GLM(model, dense)(new).covariance)
    part = fitted.select("2.*"), dense.select("2.*")
    torch.testing.assert_close(*(GLM(model, p)(new).covariance for p in part))
    sampled = MonteCarlo(model, fitted, samples=4000)(new)
    assert (sampled.variance / MonteCarlo(model, dense, samples=4000)(new).variance - 1).abs().max() < 0.2


def test_small_variances_survive_single_precision() -> None:
    """`J Σ Jᵀ` at the data is far below `J Jᵀ / δ`, which a dense covariance in single precision cannot tell."""
    model, x, y = problem("regression", 15)
    posterior = pg.fit_laplace(model, [(x, y)], "regression", "full", prior_precision=1e-3, noise=1e-3)
    single, new = posterior.to(torch.float32), x.float()
    exact, found = GLM(model, posterior)(x).variance, GLM(model.float(), single)(new).variance
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)
    dense = pg.FullPosterior(single.names, single.to_dense())
    assert (GLM(model, dense)(new).variance.double() / exact - 1).abs().max() > 0.1


def test_dense_blocks_are_put_together_from_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem("regression", 15)
    posterior = pg.fit_laplace(model, [(x, y)], "regression", "full")
    whole = posterior.to_dense()
    monkeypatch.setattr("propagauss.posteriors.spectral.BLOCK", 10)
    torch.testing.assert_close(posterior.to_dense(), whole)


# -- many parameters


def test_many_parameters_need_no_square_matrix() -> None:
    """12 rows of 20,080 parameters; the square would have 400 million entries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(500, 40), nn.Tanh(), nn.Linear(40, 1, bias=False)).eval()
    x, y = torch.randn(12, 500), torch.randn(12, 1)
    size = sum(p.numel() for p in model.parameters())
    with Largest() as largest:
        posterior = pg.fit_laplace(model, [(x, y)], "regression", "full", prior_precision=DELTA, noise=SIGMA)
        draws = posterior.sample(10)
    assert 0 < largest.entries <= 12 * size
    assert draws["0.weight"].shape == (10, 40, 500)
    j = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(dict(model.named_parameters()))
    j = torch.cat([g.flatten(2) for g in j.values()], -1).squeeze(1).double()
    gram = j @ j.mT / SIGMA**2
    expected = gram - gram @ torch.linalg.solve(gram + DELTA * torch.eye(12), gram)  # Woodbury
    torch.testing.assert_close(
        GLM(model, posterior)(x).variance.flatten().double(), expected.diagonal() * SIGMA**2 / DELTA
    )


def test_a_dense_block_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem("regression", 15)
    posterior = pg.fit_laplace(model, [(x, y)], "regression", "full")
    monkeypatch.setattr(memory.os, "sysconf", lambda name: 64)
    with pytest.raises(pg.InputError, match="dense covariance of 77 entries needs about"):
        posterior.to_dense()
