"""The experiments sensitivity, ood, linearity and gaussianity, on data small enough to be made here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import propagauss as pg
from experiments.datasets import Images
from experiments.frame.experiment import Context, Experiment
from experiments.methods.classify import Label
from experiments.mnist import gaussianity, linearity, networks
from experiments.tasks import ood, ood_methods, sensitivity
from experiments.tasks import sensitivity_measures as measures
from experiments.transformers import vit_networks
from propagauss.demo.training import mlp
from propagauss.tracing.once import traced_once


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A data folder with noisy squares, brighter for higher digits, as two sets of images."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    for name, shift in (("mnist", 4), ("fashion_mnist", 12)):
        rng = np.random.default_rng(0)
        y = np.arange(10_300) % 10
        x = np.zeros((len(y), 28, 28), dtype=np.uint8)
        x[:, shift : shift + 12, 8:20] = rng.integers(0, 60, (len(y), 12, 12)) + 18 * y[:, None, None]
        x[:, 0, 0] = 255
        parts = {"x_train": x[:10_200], "y_train": y[:10_200], "x_test": x[10_200:], "y_test": y[10_200:]}
        np.savez(folder / "images" / f"{name}.npz", **parts)
    return Context("quick", 0, folder, folder / "cache")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "QUICK", {"train": 100, "held_out": 60, "epochs": 1})
    monkeypatch.setattr(sensitivity, "STEP", {"quick": 0.3})
    monkeypatch.setattr(sensitivity, "JOINT_STEP", {"quick": 1.0})
    monkeypatch.setattr(sensitivity, "IMAGES", {"quick": 2})
    monkeypatch.setattr(sensitivity, "JOINT_IMAGES", {"quick": 1})
    monkeypatch.setattr(sensitivity, "SHOWN", 1)
    monkeypatch.setattr(sensitivity, "MAX_STEPS", 60)
    for module, name, value in (
        (ood, "SAMPLES", {"quick": 5}),
        (ood, "POINTS", {"quick": 40}),
        (ood, "VIT_POINTS", {"quick": 20}),
        (ood_methods, "DRAWS", 16),
    ):
        monkeypatch.setattr(module, name, value)


def run(experiment: Experiment, context: Context, keys: list[str] | None = None) -> dict[str, Any]:
    """Its units, with results as JSON gives them back."""
    units = [u for u in experiment.units(context) if keys is None or u.key in keys]
    with traced_once():
        return {u.key: json.loads(json.dumps(u.run(context), allow_nan=False)) for u in units}


def check_section(experiment: Experiment, records: dict[str, Any]) -> list[str]:
    section = experiment.section(records)
    assert "<table" in section.body and "data:image/svg+xml" in section.body
    assert all(isinstance(line, str) and "nan" not in line for line in section.readings)
    return list(section.readings)


@pytest.mark.usefixtures("small")
def test_sensitivity(context):
    records = run(sensitivity.EXPERIMENT, context)
    readings = check_section(sensitivity.EXPERIMENT, records)
    assert any("Bayes minus MAP" in line for line in readings)
    (record,) = records.values()
    assert set(record["scores"]) == {f"{v} {m}" for v, m in sensitivity.RUNS}
    assert all(len(texts) == 3 for texts in record["maps"].values())


def test_measures_of_maps():
    stroke = torch.zeros(1, 28, 28)
    stroke[0, 14, 10:18] = 1
    assert measures.near(stroke.flatten(1)).sum() == (8 + 4) * 5
    flat = torch.linspace(0, 1, 28).repeat(28, 1).reshape(1, -1).double()
    noise = torch.rand(1, 784, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert measures.smoothness(flat).item() > 0.99 and abs(measures.smoothness(noise).item()) < 0.2
    x, y = torch.randn(300, 784), torch.arange(300) % 3
    x[:, 5] += 5 * y
    informed = measures.informed((x, y))
    assert informed[5] and informed.float().mean() < 0.3
    values = torch.rand(784)
    low, high = values.min(), values.max()
    torch.testing.assert_close(
        measures.unpack(measures.pack(values)), ((values - low) / (high - low)).double(), atol=0.003, rtol=0
    )


def test_only_the_digits_wanted():
    pair = (torch.arange(20.0)[:, None], torch.arange(20) % 10)
    kept = sensitivity.of_digits(Images(pair, pair, pair, 10)).test
    assert kept[0].flatten().tolist() == [0, 6, 8, 10, 16, 18] and kept[1].tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.usefixtures("small")
def test_outliers_with_an_mlp(context):
    records = run(ood.EXPERIMENT, context, ["fashion_mnist-mnist-LA"])
    readings = check_section(ood.EXPERIMENT, records)
    assert any("AUROC of the entropy" in line for line in readings)
    rows = records["fashion_mnist-mnist-LA"]["rows"]
    names = {row["name"] for row in rows}
    assert {"MAP", "temperature scaling", "LA sampling", "LA GLM probit", "LA ours probit exact"} <= names
    for link in ("probit", "mean_field", "monte_carlo", "bridge"):
        assert f"LA ours {link} exact" in names and f"LA ours {link} factored" in names
    ours = next(row for row in rows if row["name"] == "LA ours probit exact")
    assert set(ours["above"]) == {"MAP", "temperature scaling"} and len(ours["detection"]) == 4


@pytest.mark.usefixtures("small")
def test_outliers_with_mean_field_vi(context):
    pytest.importorskip("ivon")
    records = run(ood.EXPERIMENT, context, ["fashion_mnist-mnist-MFVI", "fashion_mnist-mnist-engines"])
    readings = check_section(ood.EXPERIMENT, records)
    assert sum("calibrated (scale" in line for line in readings) == 4  # two engines, two posteriors
    ours = next(r for r in records["fashion_mnist-mnist-MFVI"]["rows"] if r["method"] == "ours")
    assert set(ours["above"]) == {"MFVI mean weights", "MFVI temperature scaling"}


@pytest.mark.usefixtures("small")
def test_outliers_with_a_vit(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("ivon")
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    y = np.arange(1060) % 10
    x = (rng.integers(0, 80, (1060, 32, 32, 3)) + 15 * y[:, None, None, None]).astype(np.uint8)
    parts = {"x_train": x[:1040], "y_train": y[:1040], "x_test": x[1040:], "y_test": y[1040:]}
    np.savez(tmp_path / "images" / "cifar10.npz", **parts)
    textures = rng.integers(0, 255, (10, 64, 64, 3)).astype(np.uint8)
    labels = np.arange(10)
    named = {f"x_{part}": textures for part in ("train", "val", "test")}
    np.savez(tmp_path / "images" / "dtd10_64px.npz", **named, y_train=labels, y_val=labels, y_test=labels)
    np.savez(tmp_path / "images" / "fashion_mnist.npz")
    sizes = vit_networks.QUICK | {"width": 16, "heads": 2, "train": 40, "validation": 20, "test": 20, "batch": 20}
    monkeypatch.setattr(vit_networks, "QUICK", sizes)
    monkeypatch.setattr(ood.vit, "QUICK", {"samples": 2, "fit_samples": 2, "fit_points": 4})
    context = Context("quick", 0, tmp_path, tmp_path / "cache")
    assert "cifar10-svhn" not in [u.key for u in ood.EXPERIMENT.units(context)]
    records = run(ood.EXPERIMENT, context, ["cifar10-dtd10"])
    readings = check_section(ood.EXPERIMENT, records)
    assert any("textures" in line and "MFVI" in line for line in readings)
    assert records["cifar10-dtd10"]["outside"] == 20


def test_outliers_are_seen_as_the_network_sees_its_data():
    raw = torch.rand(6, 1, 2, 2)
    raw[0, 0, 0], raw[1, 0, 0] = 0, 1
    data = (raw.flatten(1) - 0.3) / 0.2
    pair = (data, torch.zeros(6, dtype=torch.long))
    network = networks.Trained(nn.Sequential(), Images(pair, pair, pair, 10), {})
    torch.testing.assert_close(ood.as_seen(network, raw), data)


def test_difference_of_two_areas():
    """Against the bootstrap."""
    torch.manual_seed(0)
    base_in, base_out = torch.randn(400).double(), torch.randn(300).double() + 1
    one = (base_in, base_out)
    other = (base_in + torch.randn(400), base_out + torch.randn(300))
    gap, error = ood_methods.difference(one, other)
    assert gap == pytest.approx(pg.tasks.ood.evaluate(*one).auroc - pg.tasks.ood.evaluate(*other).auroc)
    gaps = []
    for _ in range(300):
        i, j = torch.randint(400, (400,)), torch.randint(300, (300,))
        gaps.append(ood_methods.difference((one[0][i], one[1][j]), (other[0][i], other[1][j]))[0])
    assert error == pytest.approx(np.std(gaps), rel=0.2)
    assert ood_methods.difference(one, one) == (0.0, 0.0)
    assert ood_methods.difference(one)[0] == pytest.approx(pg.tasks.ood.evaluate(*one).auroc)


def test_linearity(records):
    pytest.importorskip("ivon")
    found = records("linearity")
    readings = check_section(linearity.EXPERIMENT, found)
    assert any("to the power" in line for line in readings)
    assert {p["posterior"] for p in found["layers"]["posteriors"]} == {"LA", "MFVI", "MFVI with covariances"}
    assert [layer["path"] for layer in found["layers"]["posteriors"][0]["layers"]] == ["1", "3"]


def test_gaussianity(records):
    readings = check_section(gaussianity.EXPERIMENT, {"LA": records("gaussianity")["LA"]})
    assert readings[0].startswith("The paper finds the Gaussian close")
    assert len(readings) == 5  # and one for each case and layer


def test_products_of_gaussians():
    generator = torch.Generator().manual_seed(0)
    a = 2 + 0.5 * torch.randn(200_000, generator=generator).double()
    w = -1 + 0.3 * torch.randn(200_000, generator=generator).double()
    mean, variance = gaussianity.analytic(2, 0.25, -1, 0.09)
    found = gaussianity.compare(a * w, mean, variance)
    assert found["variance_ratio"] == pytest.approx(1, abs=0.02) and found["mean_error"] < 0.01
    assert 0 < found["total_variation"] < 0.1
    assert gaussianity.compare(a, 2, 0.25)["total_variation"] < 0.02
    assert gaussianity.compare(a, 20, 0.25)["total_variation"] > 0.98


def test_draws_of_activations_against_sampled_weights():
    torch.manual_seed(0)
    model = mlp([6, 8, 5, 3]).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.2) for n, p in model.named_parameters()})
    case = gaussianity.Case("MFVI", model, posterior, "diagonal", 1.0)
    x = torch.randn(6)
    for layer in gaussianity.LAYERS:
        with torch.no_grad():
            drawn = gaussianity.draw_activations(case, layer, x, 20_000, torch.Generator().manual_seed(0))
        names = [n for n in posterior.names if int(n.split(".")[0]) < layer]
        sampled = pg.baselines.MonteCarlo(model[:layer], posterior.select(*names), 20_000).latents(x[None])[:, 0]
        error = 5 * sampled.std(0) / math.sqrt(20_000)
        assert ((drawn.mean(0) - sampled.mean(0)).abs() < 2 * error + 1e-6).all()
        torch.testing.assert_close(drawn.std(0), sampled.std(0), rtol=0.05, atol=1e-3)


def test_labels_of_the_mean_weights():
    assert ood_methods._named(Label("MAP"), "MFVI").name == "MFVI mean weights"
    assert ood_methods._named(Label("MAP"), "").name == "MAP"


def test_published_numbers_are_whole():
    from experiments.published import linearity as published

    assert list(published.ERROR) == [pytest.approx(10.0**k) for k in range(-6, 1)]
    assert all(len(row) == 10 for row in published.ERROR.values())
    assert Path(published.__file__).is_file()
