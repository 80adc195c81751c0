"""What every likelihood promises: to the fit, to a predictor, to calibration, to the export."""

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical
from torch.func import functional_call, jacrev

from likelihoods.cases import CASES, Case
from propagauss import DiagonalPosterior, Gaussian, fit_laplace, streamline
from propagauss.likelihoods import LIKELIHOODS, CategoricalLikelihood
from propagauss.likelihoods.registry import LikelihoodName
from propagauss.predict import predict
from propagauss.predictive.predictor import Predictor

torch.set_num_threads(1)
F64 = torch.float64
CLASSES = (Categorical, Bernoulli)
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def outputs(case: Case, batch: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(batch, case.outputs, generator=torch.Generator().manual_seed(seed), dtype=F64)


def random_latent(case: Case, batch: int = 6) -> Gaussian:
    root = torch.randn(batch, case.outputs, case.outputs, generator=torch.Generator().manual_seed(2), dtype=F64)
    return Gaussian(outputs(case, batch), covariance=root @ root.mT / case.outputs / 2)


def network(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, case.outputs)).double().eval()


def data(case: Case, rows: int = 30) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(3), dtype=F64)
    with torch.no_grad():
        return x, case.targets(network(case)(x))


def test_every_likelihood_is_here():
    assert list(CASES) == list(LIKELIHOODS) == list(get_args(LikelihoodName))
    assert all(type(case.likelihood) is LIKELIHOODS[name] for name, case in CASES.items())


# -- the fit


@cases
def test_loss_is_the_negative_log_likelihood(case: Case):
    f = outputs(case)
    y = case.targets(f)
    terms = case.likelihood.terms(f, y, "here")
    constant = 0.5 * math.log(2 * math.pi) * y.numel() if case.likelihood.noisy else 0.0
    assert terms.loss + constant == pytest.approx(-case.conditional(f).log_prob(y).sum().item(), rel=1e-12)
    assert terms.targets == y.numel()


@cases
def test_root_is_that_of_the_hessian(case: Case):
    """Where the Hessian depends on `y`, that of the Fisher matrix, its mean over `y`."""
    f = outputs(case)
    y = case.targets(f)
    column = case.likelihood.terms(f, y, "here").column
    roots = torch.stack([column(c) for c in range(case.outputs)], -1)  # [B, C, columns]
    for i in range(len(f)):
        torch.testing.assert_close(roots[i] @ roots[i].mT, curvature(case, f[i], y[i]), atol=1e-12, rtol=1e-10)


def curvature(case: Case, f: Tensor, y: Tensor) -> Tensor:
    """Of one sample, by autograd."""

    def hessian(target: Tensor) -> Tensor:
        matched = case.likelihood.matched(f[None], target, "")[1]
        return torch.autograd.functional.hessian(lambda row: case.likelihood.loss(row[None], matched), f)

    return torch.stack([hessian(target) for target in case.curved(f[None], y[None])]).mean(0)


@cases
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_fit_equals_a_brute_force_ggn(case: Case, structure: str):
    model, (x, y) = network(case), data(case)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    size = sum(p.numel() for p in parameters.values())
    ggn = torch.zeros(size, size, dtype=F64)
    for i in range(len(x)):
        rows = jacrev(lambda p, i=i: functional_call(model, p, (x[i : i + 1],))[0])(parameters)
        j = torch.cat([rows[n].flatten(1) for n in parameters], 1)
        with torch.no_grad():
            f = model(x[i : i + 1])[0]
        ggn += j.mT @ curvature(case, f, y[i]) @ j
    ggn = ggn if structure == "full" else ggn.diagonal().diag()
    fixed = {"noise": 1.0} if case.likelihood.noisy else {}
    posterior = fit_laplace(
        model, [(x[:20], y[:20]), (x[20:], y[20:])], case.likelihood.name, structure, prior_precision=0.7, **fixed
    )
    expected = torch.linalg.inv(ggn + 0.7 * torch.eye(size, dtype=F64))
    torch.testing.assert_close(posterior.to_dense(), expected, atol=1e-10, rtol=1e-8)
    assert ("noise" in posterior.details) == case.likelihood.noisy


@cases
def test_evidence_is_that_of_the_loss(case: Case):
    """`log p(y | θ) + log N(θ; 0, 1/δ) - log N(θ; θ, Σ)`, from the dense posterior."""
    model, (x, y) = network(case), data(case)
    fixed = {"noise": 1.0} if case.likelihood.noisy else {}
    posterior = fit_laplace(model, [(x, y)], case.likelihood.name, "full", prior_precision=0.7, **fixed)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    with torch.no_grad():
        log_likelihood = case.conditional(model(x)).log_prob(y).sum()
    determinant = torch.logdet(posterior.to_dense()) + len(theta) * math.log(0.7)
    expected = log_likelihood - 0.35 * theta.square().sum() + 0.5 * determinant
    assert posterior.details["log_marginal_likelihood"] == pytest.approx(expected.item(), rel=1e-9)


# -- the prediction


@cases
@pytest.mark.parametrize("full", [False, True], ids=["variance", "covariance"])
def test_predictive_against_draws_of_the_latent(case: Case, full: bool):
    latent = random_latent(case)
    latent = latent if full else Gaussian(latent.mean, latent.variance)
    y, draws = case.targets(latent.mean), 200_000
    f = latent.sample((draws,), torch.Generator().manual_seed(4))
    if case.moments:
        return _check_moments(case, latent, f)
    density = case.conditional(f).log_prob(y.expand(draws, *y.shape)).exp()
    error = 5 * density.std(0) / math.sqrt(draws) + 2e-4  # five standard errors, and that of the Monte Carlo link
    found = case.likelihood.log_predictive(case.likelihood.moments(latent), y).exp()
    assert ((found - density.mean(0)).abs() < error).all()
    torch.testing.assert_close(case.likelihood.predictive(latent).log_prob(y).exp(), found)


def _check_moments(case: Case, latent: Gaussian, f: Tensor) -> None:
    found, truth = case.likelihood.predictive(latent), case.conditional(f)
    parts = case.likelihood.decompose(latent)
    root = math.sqrt(len(f))
    assert ((found.mean - truth.mean.mean(0)).abs() < 5 * truth.mean.std(0) / root).all()
    assert ((parts.aleatoric - truth.variance.mean(0)).abs() < 5 * truth.variance.std(0) / root).all()
    squares = (truth.mean - found.mean).square()
    assert ((parts.epistemic - squares.mean(0)).abs() < 5 * squares.std(0) / root).all()
    y = case.targets(latent.mean)
    density = case.likelihood.log_predictive(case.likelihood.moments(latent), y)
    torch.testing.assert_close(density, found.log_prob(y))


@cases
def test_without_variance_it_is_the_likelihood_itself(case: Case):
    f = outputs(case)
    y = case.targets(f)
    found = case.likelihood.predictive(Gaussian(f, torch.zeros_like(f)))
    torch.testing.assert_close(found.log_prob(y), case.conditional(f).log_prob(y), atol=1e-6, rtol=1e-6)


@cases
def test_parts_add_up(case: Case):
    """To the variance, or to the entropy of classes; without variance of the latent, nothing is epistemic."""
    latent = random_latent(case)
    parts, predictive = case.likelihood.decompose(latent), case.likelihood.predictive(latent)
    classes = isinstance(predictive, CLASSES)
    torch.testing.assert_close(parts.total, predictive.entropy() if classes else predictive.variance)
    certain = case.likelihood.decompose(Gaussian(latent.mean, torch.zeros_like(latent.mean)))
    assert (certain.epistemic <= 1e-14).all() and (certain.epistemic >= 0).all() and (parts.epistemic > 0).all()


@cases
def test_summary_says_the_same(case: Case):
    latent = random_latent(case)
    found, parts, predictive = (
        f(latent) for f in (case.likelihood.summary, case.likelihood.decompose, case.likelihood.predictive)
    )
    if isinstance(predictive, CLASSES):
        own = {"probabilities": predictive.probs, "prediction": predictive.mode.long(), "entropy": predictive.entropy()}
    else:
        own = {"mean": predictive.mean, "stddev": predictive.stddev}
    expected = own | {"epistemic": parts.epistemic, "aleatoric": parts.aleatoric}
    if isinstance(predictive, Categorical):
        centre = torch.eye(case.outputs, dtype=F64) - 1 / case.outputs
        around = (centre @ latent.covariance @ centre).diagonal(dim1=1, dim2=2)
        expected["latent_variance"] = around.mean(-1)
    elif isinstance(predictive, CLASSES):
        expected["latent_variance"] = latent.variance
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


# -- calibration


@cases
def test_fit_scale_finds_the_scale_that_made_the_data(case: Case):
    torch.manual_seed(5)
    x = torch.randn(4000, case.outputs, dtype=F64)
    y = case.targets(x + math.sqrt(2.0) * torch.randn_like(x))

    def net(x: Tensor) -> Gaussian:
        return Gaussian(x, torch.ones_like(x))

    likelihood = case.likelihood
    if isinstance(likelihood, CategoricalLikelihood):
        likelihood = replace(likelihood, samples=64)  # enough, and quick
    predictor = Predictor(net, likelihood)
    before = -predictor(x).log_prob(y).mean().item()
    predictor.fit_scale([(x[:2500], y[:2500]), (x[2500:], y[2500:])], progress=False)
    report = predictor.fit_report
    assert report is not None and report.points == 4000
    assert report.nlpd_before == pytest.approx(before)
    assert report.nlpd_after == pytest.approx(-predictor(x).log_prob(y).mean().item())
    assert predictor.scale == pytest.approx(2.0, rel=0.2)


# -- the export


@cases
def test_exported_and_streamed(case: Case, tmp_path: Path):
    model = network(case).float()
    posterior = DiagonalPosterior({n: torch.full_like(p, 1e-2) for n, p in model.named_parameters()})
    predictor = Predictor(streamline(model, posterior, torch.zeros(2, 3)), case.likelihood, scale=2.0)
    x = torch.randn(7, 3)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        path = predictor.export(tmp_path / "p.pt2")
        expected = case.likelihood.exported(predictor.latent(x))
        found = torch.export.load(path).module()(x)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    np.save(tmp_path / "x.npy", x.numpy())
    predict(path, tmp_path / "x.npy", tmp_path / "out.parquet", progress=False)
    table = pq.read_table(tmp_path / "out.parquet")
    columns = dict.fromkeys(name.rstrip("_0123456789") for name in table.column_names[1:])
    assert list(columns)[: len(case.likelihood.columns)] == list(case.likelihood.columns)
    for name, value in expected.items():
        name = "probability" if name == "probabilities" else name
        names = [name] if value.shape[1] == 1 else [f"{name}_{i}" for i in range(value.shape[1])]
        torch.testing.assert_close(torch.tensor(np.stack([table[n].to_numpy() for n in names], 1)), value)
