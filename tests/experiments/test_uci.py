"""The UCI experiment and the one on the number of samples: their parts, and both end to end on tiny made-up data."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel
from torch import nn

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import propagauss as pg
from experiments.cost import mc_samples
from experiments.cost.mc_curves import NLPD_STDDEV, Draws, Target, curve, reaches, saturation
from experiments.frame.experiment import Context
from experiments.frame.run import run
from experiments.published import uci as published
from experiments.report.page import section
from experiments.uci import layers as uci_layers
from experiments.uci import uci
from experiments.uci.data import SETS, encode, load, split
from experiments.uci.methods import STDDEV, bold, glm_scores, moments, our_scores, pooled, sampling_scores
from experiments.uci.posteriors import full_laplace, laplace
from experiments.uci.summary import Summary, _ranks
from propagauss.baselines import GLM
from propagauss.demo.methods import Sampler
from propagauss.demo.training import mlp


def write_set(folder: Path, name: str, rows: int = 60) -> None:
    """A file with text, gaps and a target that depends on two inputs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    y = x[:, 0] - 0.5 * x[:, 1] ** 2 + 0.1 * rng.normal(size=rows)
    letters = np.where(x[:, 2] > 0, "A", "B")
    folder.joinpath("uci").mkdir(parents=True, exist_ok=True)
    with folder.joinpath("uci", f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["motor", "one", "two", "three", "target"])
        for i in range(rows):
            writer.writerow([letters[i], x[i, 0], x[i, 1], "" if i % 7 == 0 else x[i, 2], y[i]])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_set(folder, "servo")
    return folder


@pytest.fixture(scope="module")
def parts(data):
    return split(*load(Context("quick", data=data), "servo"), fold=0, seed=0)


@pytest.fixture(scope="module")
def fitted(parts):
    return laplace(parts, [4, 10, 1], 50, 0)


# -- data


def test_text_becomes_places_in_an_order():
    assert encode(np.array(["feb", "dec", "jan"])).tolist() == [1, 11, 0]
    assert encode(np.array(["sun", "mon"])).tolist() == [6, 0]
    assert encode(np.array(["b", "a", "", "c"])).tolist()[:2] == [1, 0]
    assert math.isnan(encode(np.array(["b", "", "c"]))[1])


def test_folds_cover_every_row_once_and_are_standardised_by_the_training_part(data):
    x, y = load(Context("quick", data=data), "servo")
    assert np.isnan(x[:, 3]).sum() > 0
    folds = [split(x, y, fold, 0) for fold in range(5)]
    assert sum(len(f.test[0]) for f in folds) == len(x)
    for f in folds:
        assert torch.cat([f.train[0], f.validation[0], f.test[0]]).isfinite().all()
        assert sum(f.sizes.values()) == len(x)
        assert f.train[0].mean(0).abs().max() < 1e-5
        torch.testing.assert_close(f.train[1].std(correction=0), torch.tensor(1.0))


def test_sets_are_those_of_the_paper():
    assert set(SETS) == set(published.NLPD) == set(published.RMSE)
    assert SETS["cac"].parameters == 12_901


# -- posteriors


@pytest.mark.parametrize("hidden", [4, 40])  # fewer and more parameters than points
def test_full_laplace_is_that_of_the_library(parts, hidden):
    """But for the precision in which it is fitted."""
    torch.manual_seed(0)
    model = mlp([4, hidden, 1]).eval()
    mine = full_laplace(model, *parts.train)
    theirs = pg.fit_laplace(model, parts.train_loader, "regression", "full", progress=False)
    assert mine.noise == pytest.approx(theirs.details["noise"], rel=1e-4)
    assert mine.posterior.dtype == next(model.parameters()).dtype == torch.float32
    torch.testing.assert_close(mine.posterior.to_dense(), theirs.to_dense(), rtol=1e-3, atol=1e-5)


def test_mean_field_learns(parts):
    pytest.importorskip("ivon")
    from experiments.uci.posteriors import mean_field

    found = mean_field(parts, [4, 10, 1], 300, 0)
    x, y = parts.train
    assert (found.model(x) - y).square().mean() < 0.7
    assert 0 < found.noise < 1
    assert found.posterior.names == tuple(n for n, _ in found.model.named_parameters())


# -- methods


def test_scores_are_those_of_the_predictions(fitted, parts):
    x, y = parts.test
    glm, glm_fitted = glm_scores("LA", fitted, parts)
    expected = pg.Regressor(GLM(fitted.model, fitted.posterior), fitted.noise)(x)
    torch.testing.assert_close(glm.losses, -expected.log_prob(y).flatten().double(), rtol=1e-5, atol=1e-6)
    assert glm.as_dict()["rmse"] == pytest.approx((fitted.model(x) - y).square().mean().sqrt().item(), rel=1e-5)
    assert glm.scale == 1 and glm_fitted.scale != 1
    ours, as_it_is, variances = our_scores("LA", fitted, parts)
    net = pg.streamline(fitted.model, fitted.posterior, x[:2], covariance="full")
    torch.testing.assert_close(as_it_is.losses, -pg.Regressor(net, fitted.noise)(x).log_prob(y).flatten().double())
    assert ours.scale != 1 and [s.name for s in (ours, variances)] == ["LA ours", "LA ours, variances only"]
    torch.testing.assert_close(ours.errors, glm.errors, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_layer_by_layer_is_the_glm_of_independent_layers(parts, structure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).eval()
    posterior = pg.fit_laplace(model, [parts.train], likelihood="regression", structure=structure, progress=False)
    x = parts.test[0]
    expected, found = GLM(model, posterior)(x), uci_layers.LayerwiseGLM(model, posterior)(x)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-4, atol=1e-7)


def test_sampling_scores_are_the_mixture(fitted, parts):
    x, y = parts.test
    mixture, normal, scaled = sampling_scores("LA", fitted, parts, 30, 0)
    sampler = Sampler(fitted.model, fitted.posterior, 30, 0)
    single = -sampler.log_density(x, y, fitted.noise).flatten().double()
    torch.testing.assert_close(mixture.losses, single, rtol=1e-5, atol=1e-5)  # the scores use double precision
    assert (normal.errors == mixture.errors).all() and normal.losses.isfinite().all()
    assert scaled.scale is not None and scaled.scale < 1


def test_one_layer_has_no_covariance_to_other_layers(parts):
    """A linear model: GLM, GLM layer by layer and ours are the same."""
    fitted = laplace(parts, [4, 1], 20, 0)
    found = {name: numbers[STDDEV] for name, numbers in uci_layers.compare(fitted, parts).items()}
    assert all(stddev == pytest.approx(found["GLM"], rel=1e-3) for stddev in found.values())


# -- tests


def test_bold_is_a_paired_t_test_over_all_folds():
    rng = np.random.default_rng(0)
    base = rng.normal(size=100)
    values = np.stack([base, base + 0.01 + 0.3 * rng.normal(size=100), base + 0.2 + 0.1 * rng.normal(size=100)])
    folds = [moments(list(torch.from_numpy(part))) for part in np.split(values, [30, 55], axis=1)]
    n, mean, covariance = pooled(folds)
    np.testing.assert_allclose(mean, values.mean(1))
    np.testing.assert_allclose(covariance, np.cov(values, bias=True))
    best = int(mean.argmin())
    expected = [i == best or ttest_rel(v, values[best]).pvalue >= 0.05 for i, v in enumerate(values)]
    assert bold(n, mean, covariance) == expected
    assert not expected[2]


def test_what_differs_by_rounding_is_tied():
    mean, covariance = np.array([1.0, 1.0 + 1e-9]), np.array([[1.0, 1.0], [1.0, 1.0]])
    assert bold(100, mean, covariance) == [True, True]
    assert _ranks({"a": 0.1, "b": 0.1 + 1e-9, "c": 0.3}) == {"a": 1.5, "b": 1.5, "c": 3.0}


# -- draws


def test_curves_hold_separate_predictions(fitted, parts):
    x, y = parts.test
    draws = Draws(fitted.model, fitted.posterior, seed=3)
    points = curve(draws, x, Target(y, fitted.noise), [10, 20, 40])
    assert [(p["samples"], p["predictions"]) for p in points] == [(10, 4), (20, 2), (40, 1)]
    outputs = torch.cat(list(draws.outputs(x, 10, 40))).double()
    density = torch.distributions.Normal(outputs, fitted.noise).log_prob(y).logsumexp(0) - math.log(40)
    assert points[-1]["nlpd"] == pytest.approx(-density.mean().item(), rel=1e-6)
    rmse = (outputs.mean(0) - y).square().mean().sqrt().item()
    assert points[-1]["second"] == pytest.approx(rmse, rel=1e-6)
    assert points[-1][NLPD_STDDEV] is None and points[0][NLPD_STDDEV] > 0


def test_draws_of_classes_one_by_one_are_those_at_once():
    torch.manual_seed(0)
    model, x, y = mlp([3, 5, 4]).eval(), torch.randn(6, 3), torch.randint(4, (6,))
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in model.named_parameters()})
    one, other = (curve(Draws(model, posterior, 0, v), x, Target(y), [5, 10]) for v in (True, False))
    assert one[-1]["nlpd"] == pytest.approx(other[-1]["nlpd"], rel=1e-5)
    probs = torch.cat(list(Draws(model, posterior).outputs(x, 5, 10))).softmax(-1).mean(0)
    assert one[-1]["nlpd"] == pytest.approx(-probs.gather(1, y[:, None]).log().mean().item(), rel=1e-5)
    assert one[-1]["second"] == pytest.approx((probs.argmax(-1) == y).double().mean().item())


def test_saturation_is_the_last_time_that_the_curve_comes_near():
    points = [{"samples": s, "nlpd": v} for s, v in ((10, 1.0), (20, 1.3), (30, 1.005), (40, 1.0))]
    assert saturation(points, 0.01) == 30
    assert reaches(points, 1.1) == 10 and reaches(points, 0.5) is None


# -- whole experiments


@pytest.fixture
def tiny(monkeypatch):
    settings = uci.QUICK | {"map_steps": 20, "ivon_steps": 40, "samples": 20, "rows": None, "hidden": 8}
    monkeypatch.setattr(uci, "QUICK", settings)


def test_uci_runs_resumes_and_reports(data, tmp_path, tiny):
    pytest.importorskip("ivon")
    context = Context("quick", data=data, cache=tmp_path / "cache")
    assert [u.key for u in uci.units(context)] == [
        "servo-0",
        "servo-1",
        "layers-servo",
        "calibrated-servo-0",
    ]  # of the set that is there
    assert run(uci.EXPERIMENT, context, tmp_path) == 4
    assert run(uci.EXPERIMENT, context, tmp_path) == 0
    found = section("uci", tmp_path, "quick")
    assert found is not None and found.headline.count("\n") == 6 + 2 + 1 + 10  # two tables
    assert "1.287 ± 0.069" in found.body and "table" in found.body
    assert any("MFVI ours at least as often as sampling" in r for r in found.readings)
    assert any("LA linearised, scale and noise by `calibrate`" in r for r in found.readings)
    assert "The networks are those of the tables above." in found.body


def test_summary_of_stored_folds(data, tmp_path, tiny):
    pytest.importorskip("ivon")
    context = Context("quick", data=data)
    record = uci.run_fold("servo", 0, context)
    s = Summary([record])
    assert s.mean("nlpd", "LA GLM") == pytest.approx(record["scores"]["LA GLM"]["nlpd"])
    marks = s.bold("rmse", ("LA sampling", "LA GLM", "LA ours"))
    assert marks["LA GLM"] == marks["LA ours"]  # the same mean


def test_mc_samples_runs_and_reports(data, tmp_path, tiny):
    pytest.importorskip("ivon")
    context = Context("quick", data=data, cache=tmp_path / "cache")
    assert [u.key for u in mc_samples.units(context)] == ["uci-servo", "linearised-uci-servo"]
    assert run(mc_samples.EXPERIMENT, context, tmp_path) == 2
    found = section("mc-samples", tmp_path, "quick")
    assert found is not None and "data:image/svg+xml" in found.body
    assert len(found.readings) == 2
