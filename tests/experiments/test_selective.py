"""Pieces of the experiment `selective`; `test_reproduce.py` runs it as a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import propagauss as pg
from experiments.selective import factors
from experiments.selective.methods import Prediction, mixed
from experiments.selective.selective import measured, resampled
from propagauss.demo.training import mlp


def test_resampled_areas_are_those_of_the_metric() -> None:
    torch.manual_seed(0)
    certain, correct = torch.randn(50), torch.rand(50) < 0.7
    chosen = torch.randint(50, (4, 50))
    expected = [pg.metrics.aurc(certain[rows], correct[rows]) for rows in chosen]
    torch.testing.assert_close(resampled(certain, correct, chosen), torch.tensor(expected).double())


def test_mixed_networks() -> None:
    same = torch.randn(1, 6, 3).double().expand(4, 6, 3)
    log_probs, information = mixed(same)
    torch.testing.assert_close(log_probs, same[0].log_softmax(-1))
    torch.testing.assert_close(information, torch.zeros(6).double(), atol=1e-12, rtol=0)
    apart = torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]]).double()
    log_probs, information = mixed(apart)
    torch.testing.assert_close(log_probs.exp(), torch.full((1, 2), 0.5).double())
    torch.testing.assert_close(information, torch.tensor([0.5]).double().log().neg())


def test_differences_are_from_the_named_methods() -> None:
    torch.manual_seed(0)
    y, logits = torch.arange(40) % 3, torch.randn(40, 3).double()
    names = ("plain model", "temperature scaling", "deep ensemble of 5")
    found = [Prediction(n, "", "", (t * logits).log_softmax(-1), None, {}) for t, n in enumerate(names, 1)]
    rows = measured(found, y, 10)
    assert rows[0]["against"]["plain model"] == [0.0, 0.0] and rows[0]["epistemic"] is None
    for row in rows:
        expected = row["aurc"] - rows[2]["aurc"]
        assert row["against"]["deep ensemble of 5"][0] == pytest.approx(expected)
        assert row["coverage"] == sorted(row["coverage"])


def test_factors_are_found_again() -> None:
    """One random layer at the end is streamlined exactly; what is multiplied wrongly before it is undone."""
    torch.manual_seed(0)
    model, x = mlp([4, 6, 3]).eval(), torch.randn(64, 4)
    posterior = pg.DiagonalPosterior({n: 1e-6 * torch.rand_like(p) for n, p in model.named_parameters()})
    validation = [(x, torch.zeros(64, dtype=torch.long))]
    last = next(reversed(dict(model.named_children())))
    found = factors.fit_factors(model, posterior.select(f"{last}.*"), validation)
    assert found == {last: pytest.approx(1, abs=1e-4)}
    scaled = factors.with_factors(model, posterior, validation)
    exact = pg.linearise(model, posterior, x[:2])(x).variance
    before, after = (pg.streamline(model, p, x[:2])(x).variance for p in (posterior, scaled))
    assert ((after / exact - 1).square().mean() <= (before / exact - 1).square().mean()).item()


def test_factors_of_kronecker_posteriors() -> None:
    model = nn.Linear(3, 2).eval()
    posterior = pg.KroneckerPosterior({"weight": (torch.eye(2), torch.eye(3)), "bias": (torch.eye(2),)})
    scaled = factors.rescaled(posterior, {"weight": 3.0, "bias": 2.0})
    variances = {n: scaled.covariance(n).diagonal() / posterior.covariance(n).diagonal() for n in posterior.names}
    assert variances["weight"].tolist() == pytest.approx([3.0] * 6)
    assert variances["bias"].tolist() == pytest.approx([2.0, 2.0])
    assert set(posterior.names) == set(dict(model.named_parameters()))


def test_expected_second_moments() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2)).eval()
    changed, x = factors.with_second_moments(model), torch.randn(3, 5)
    torch.testing.assert_close(changed(x), model(x))
    assert isinstance(model[1], nn.LayerNorm)
    for variance, close in ((1e-10, True), (1.0, False)):
        posterior = pg.DiagonalPosterior({"0.weight": torch.full((8, 5), variance)})
        ours, theirs = (pg.streamline(m, posterior, x)(x) for m in (changed, model))
        assert torch.allclose(ours.variance, theirs.variance, rtol=1e-3) == close
        assert close or (ours.variance < theirs.variance).all()
