"""The MLP experiments on made-up images: networks and their cache, ways to predict, and whole units."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments.datasets import DataMissing
from experiments.frame.experiment import Context
from experiments.methods import mlp
from experiments.mnist import mnist, moments, networks, rotated
from experiments.mnist import training as mnist_training
from experiments.published import mnist as published
from experiments.published import rotated as published_curves
from propagauss.baselines import GLM
from propagauss.posteriors import DiagonalPosterior, KroneckerPosterior, fit_laplace
from propagauss.posteriors.precision import with_prior_precision
from propagauss.predictive.classifier import Classifier

Records = Callable[[str], dict[str, Any]]


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A bright block whose place is the class, in noise."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 10
    x = rng.integers(0, 120, (count, 28, 28))
    for i, label in enumerate(y):
        row, column = divmod(int(label), 5)
        x[i, 4 + 12 * row : 12 + 12 * row, 1 + 5 * column : 6 + 5 * column] += 100
    return x.astype(np.uint8), y.astype(np.uint8)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    arrays = {}
    for seed, (part, count) in enumerate({"train": 120, "val": 40, "test": 40}.items()):
        arrays[f"x_{part}"], arrays[f"y_{part}"] = images(count, seed)
    np.savez(folder / "images" / "mnist.npz", **arrays)
    return Context("quick", 0, folder, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def small() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    return model, torch.randn(30, 5, dtype=torch.float64), torch.randint(0, 3, (30,))


# -- networks


def test_pixels_are_standardised_by_the_training_part(context: Context):
    data = networks.standardised(context, "mnist")
    assert data.train[0].shape == (120, 784)
    assert abs(data.train[0].mean().item()) < 1e-5 and data.train[0].std().item() == pytest.approx(1, abs=1e-5)
    assert data.test[0].mean().item() != 0


def test_networks_are_trained_once(context: Context, monkeypatch: pytest.MonkeyPatch):
    first = networks.map_network(context, "mnist")
    assert not first.model.training and first.details["prior_precision"] == networks.MAP["prior_precision"]
    posterior = networks.laplace(context, "mnist", "kronecker")
    for name in ("_train_map", "fit_laplace"):
        monkeypatch.setattr(networks, name, lambda *_, **__: pytest.fail("trained again"))
    again = networks.map_network(context, "mnist")
    torch.testing.assert_close(again.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)
    assert networks.laplace(context, "mnist", "kronecker").details == posterior.details
    assert {p.suffix for p in context.cache.iterdir()} == {".json", ".safetensors"}


def test_other_settings_seeds_and_data_are_other_networks(context: Context, monkeypatch: pytest.MonkeyPatch):
    first = networks.map_network(context, "mnist")
    other_seed = networks.map_network(Context("quick", 1, context.data, context.cache), "mnist")
    monkeypatch.setitem(networks.MAP, "prior_precision", 100.0)
    other_prior = networks.map_network(context, "mnist")
    for other in (other_seed, other_prior):
        assert not torch.equal(other.model[0].weight, first.model[0].weight)


def test_ivon_posterior_belongs_to_the_mean(context: Context):
    pytest.importorskip("ivon")
    trained, posterior = networks.ivon_network(context, "mnist")
    assert isinstance(posterior, DiagonalPosterior) and posterior.names == tuple(dict(trained.model.named_parameters()))
    assert posterior.details["prior_precision"] == pytest.approx(networks.IVON["prior_precision"])


# -- ways to predict


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_glm_is_that_of_the_jacobians(small, structure):
    model, x, y = small
    posterior = fit_laplace(model, [(x, y)], structure=structure, progress=False)
    as_it_is, fitted = mlp.glm(model, posterior, "LA", [(x, y)])
    for found in (as_it_is, fitted):
        expected = Classifier(GLM(model, posterior), scale=found.label.scale).log_probs(x)
        torch.testing.assert_close(found.log_probs(x), expected)
    assert fitted.label.scale != 1


def test_other_forms_of_a_kronecker_posterior(small):
    """Against posteriors built from the factors themselves."""
    model, *_ = small
    factors = {}
    for number in (0, 2, 4):
        out, inside = model[number].weight.shape
        b, a = (torch.randn(3 * n, n, dtype=torch.float64) for n in (out, inside))
        factors |= {f"{number}.weight": (b.mT @ b, a.mT @ a), f"{number}.bias": (b.mT @ b,)}
    posterior = KroneckerPosterior(factors, 0.3).bind(dict(model.named_parameters()))
    posterior.details = {"prior_precision": 0.3}
    expected = KroneckerPosterior(factors, 0.3, damping="factored"), KroneckerPosterior(factors, 7.0)
    found = mlp.factored(posterior), with_prior_precision(posterior, 7.0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense())
    assert found[1].details["prior_precision"] == 7.0


def test_other_priors_of_a_diagonal_posterior(small):
    model, x, y = small
    posterior = fit_laplace(model, [(x, y)], prior_precision=2.0, progress=False)
    expected = fit_laplace(model, [(x, y)], prior_precision=50.0, progress=False)
    torch.testing.assert_close(with_prior_precision(posterior, 50.0).to_dense(), expected.to_dense())


# -- units and sections


def test_length_of_training(context: Context):
    record = json.loads(json.dumps(mnist_training.measure(context, "mnist", [1, 2]), allow_nan=False))
    assert [row["epochs"] for row in record["rows"]] == [1, 1, 1, 2, 2, 2]
    assert {row["method"] for row in record["rows"]} == {"MAP", "temperature scaling", "ours"}
    assert all(0 <= row["ece"] <= 1 for row in record["rows"])
    words = mnist_training.reading("MNIST", record, 1.0)
    assert "1 epochs: MAP" in words and "at most 1.0 for networks of 1, 2 epochs" in words
    assert "none of them" in mnist_training.reading("MNIST", record, 0.0)


def test_mnist_unit(context: Context, records: Records):
    pytest.importorskip("ivon")
    unit, engines = mnist.units(context)
    record, both = (records("mnist")[each.key] for each in (unit, engines))
    assert both["rows"][0]["nlpd"] == record["rows"][0]["nlpd"]  # the same network
    keys = {row["key"] for row in record["rows"]}
    assert len(keys) == len(record["rows"]) and set(mnist.ROWS) <= keys
    assert all(0 <= row["accuracy"] <= 1 and row["ece_floor"] >= 0 for row in record["rows"])
    assert {r["posterior"] for r in record["rows"] if r["best_nlpd"]} & {"MFVI"}
    section = mnist.section({"mnist": record})
    assert "0.063" in section.body and "LA on MNIST" in section.readings[0]
    assert "both engines over three seeds: not run" in section.body and not section.headline
    section = mnist.section({"mnist": record, engines.key: both})
    assert "linearised minus streamlined" in section.readings[0] and "not run" not in section.body
    assert section.headline.count("\n") == 1 + len(both["rows"]) and "**LA linearised, calibrated**" in section.headline


def test_moments_unit(records: Records):
    record = records("moments")["mnist"]
    assert {row["form"].split(",")[0] for row in record["rows"]} == {"", "linearise", "moments"}
    section = moments.section({"mnist": record})
    assert "0.867" in section.body and "linearis" in section.readings[0]


def test_rotated_units(records: Records):
    pytest.importorskip("ivon")
    stored = records("rotated")
    found = {name for record in stored.values() for name in record["curves"]}
    assert set(rotated.CURVES) <= found
    assert all(len(c["nlpd"]) == 3 for record in stored.values() for c in record["curves"].values())
    assert rotated.section(stored).body.count("<figure>") == 2
    assert rotated.section({"la": stored["la"]}).readings  # a run that was stopped half-way has a report, too


def test_rotation_is_counter_clockwise_about_the_centre():
    x = torch.rand(2, 1, 28, 28)
    for degrees, turns in ((0, 0), (90, 1), (180, 2)):
        torch.testing.assert_close(rotated.rotate(x, degrees), x.rot90(turns, (2, 3)), rtol=0, atol=1e-4)
    assert rotated.rotate(x, 45)[..., 0, 0].eq(0).all()


def test_missing_data_is_named(tmp_path: Path):
    for experiment in (mnist, moments, rotated):
        with pytest.raises(DataMissing, match=r"mnist\.npz"):
            experiment.units(Context("quick", 0, tmp_path, tmp_path))


def test_published_numbers_are_complete():
    for table in (published.ACC, published.NLPD, published.ECE):
        assert {tuple(row) for row in table.values()} == {tuple(published.ACC["mnist"])}
    for curves in (published_curves.NLPD, published_curves.ACC):
        assert all(len(curve) == 19 for curve in curves.values())
