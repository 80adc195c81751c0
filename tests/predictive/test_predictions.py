"""Whole data sets: the arrays of `predict` are what single calls return, whatever form the data have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import propagauss as pg
from propagauss.baselines import MAP, MonteCarlo
from propagauss.likelihoods import PoissonLikelihood
from propagauss.predictive.predictions import Predictions
from propagauss.predictive.predictor import Predictor

torch.manual_seed(0)
X, Y = torch.randn(11, 4), torch.randint(0, 3, (11,))
MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
POSTERIOR = pg.DiagonalPosterior({n: torch.full_like(p, 5e-2) for n, p in MODEL.named_parameters()})


@pytest.fixture(scope="module")
def net() -> pg.Streamlined:
    return pg.streamline(MODEL, POSTERIOR, X[:2])


DATA: dict[str, Callable[[], Any]] = {
    "tensor": lambda: X,
    "numpy": lambda: X.numpy(),
    "numpy in double precision": lambda: X.numpy().astype(np.float64),
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=4),
    "loader without labels": lambda: DataLoader(TensorDataset(X), batch_size=4),
    "list of tensors": lambda: [X[:3], X[3:]],
    "generator": lambda: (x for x in X.split(2)),
}


@pytest.mark.parametrize("form", DATA)
def test_classes(form: str, net: pg.Streamlined) -> None:
    classifier = pg.Classifier(net, link="mean_field", scale=2.0)
    found, single = classifier.predict(DATA[form](), batch_size=5), classifier(X)
    np.testing.assert_allclose(found.probabilities, single.probs.numpy(), atol=1e-5)
    assert np.array_equal(found.prediction, single.probs.argmax(-1).numpy())
    np.testing.assert_allclose(found.entropy, single.entropy().numpy(), atol=1e-5)
    np.testing.assert_allclose(found.epistemic + found.aleatoric, found.entropy, atol=1e-5)
    np.testing.assert_allclose(found.epistemic, classifier.decompose(X).epistemic.numpy(), atol=1e-5)
    np.testing.assert_allclose(found.latent_variance, 2 * 2 / 3 * net(X).variance.mean(-1).numpy(), rtol=1e-4)
    assert len(found) == 11 and found.is_classes and (found.epistemic >= 0).all()


def test_what_all_logits_have_in_common_is_no_latent_variance() -> None:
    net = pg.linearise(MODEL, POSTERIOR, X[:2])
    classifier, latent = pg.Classifier(net), net(X)
    found = classifier.predict(X).latent_variance
    logits = latent.sample((200_000,), torch.Generator().manual_seed(0))
    around = logits - logits.mean(-1, keepdim=True)
    np.testing.assert_allclose(found, around.var(0).mean(-1).numpy(), rtol=0.02)
    shifted = pg.Gaussian(latent.mean, covariance=latent.covariance + 7.0)  # one random number added to all
    again = classifier.likelihood.summary(shifted)["latent_variance"]
    np.testing.assert_allclose(again.numpy(), found, rtol=1e-3)


def test_values(net: pg.Streamlined) -> None:
    regressor = pg.Regressor(net, noise=torch.tensor([0.1, 0.2, 0.3]))
    found, single = regressor.predict(X, batch_size=4), regressor(X)
    np.testing.assert_allclose(found.mean, single.mean.numpy(), atol=1e-6)
    np.testing.assert_allclose(found.stddev, single.stddev.numpy(), atol=1e-6)
    np.testing.assert_allclose(found.epistemic + found.aleatoric, found.stddev**2, rtol=1e-5)
    low, high = found.interval(0.8)
    np.testing.assert_allclose(low, norm.ppf(0.1, found.mean, found.stddev), rtol=1e-4)
    np.testing.assert_allclose(high, norm.ppf(0.9, found.mean, found.stddev), rtol=1e-4)
    assert found.fields == ("mean", "stddev", "epistemic", "aleatoric")


@pytest.mark.parametrize("make", [lambda: MAP(MODEL), lambda: MonteCarlo(MODEL, POSTERIOR, samples=8)])
def test_baselines_predict_as_well(make: Callable[[], Any]) -> None:
    found = pg.Classifier(make()).predict(DataLoader(TensorDataset(X, Y), batch_size=4))
    assert found.probabilities.shape == (11, 3)


def test_bfloat16_becomes_what_numpy_has(net: pg.Streamlined) -> None:
    half = pg.streamline(MODEL, POSTERIOR, X[:2]).to(torch.bfloat16)
    assert pg.Classifier(half).predict(X.bfloat16()).probabilities.dtype == np.float32


def test_chosen_outputs() -> None:
    net = pg.linearise(MODEL, POSTERIOR, X[:2], outputs=2)
    assert pg.Classifier(net).predict(X).latent_variance.shape == (11,)


# -- sets, acquisition


def test_sets_against_a_loop(net: pg.Streamlined) -> None:
    found = pg.Classifier(net).predict(X)
    for level in (0.3, 0.7, 0.99):
        for probs, members in zip(found.probabilities, found.set(level), strict=True):
            expected, total = np.zeros(3, dtype=bool), 0.0
            for c in sorted(range(3), key=lambda c: -probs[c]):
                if total < level:
                    expected[c] = True
                    total += float(probs[c])
            assert np.array_equal(members, expected)


def test_sets_of_equally_probable_classes_and_of_separate_probabilities() -> None:
    even = Predictions({"probabilities": np.full((1, 4), 0.25), "prediction": np.zeros(1, int)}, "classification")
    assert even.set(0.5).tolist() == [[True, True, False, False]]
    apart = Predictions({"probabilities": np.array([0.97, 0.5]), "prediction": np.array([1, 1])}, "binary")
    assert apart.set(0.9).tolist() == [[False, True], [True, True]]


def test_acquisition_takes_the_most_uncertain_and_keeps_the_order_of_ties(net: pg.Streamlined) -> None:
    found = pg.Classifier(net).predict(X)
    for by in ("epistemic", "latent_variance", "entropy"):
        chosen = found.acquire(3, by)
        assert set(chosen) == set(np.argsort(-getattr(found, by))[:3])
    tied = Predictions(
        {"mean": np.zeros((4, 2)), "epistemic": np.array([[1, 0], [0, 1], [2, 2], [0, 0]])}, "regression"
    )
    assert tied.acquire(4).tolist() == [2, 0, 1, 3]
    several = pg.Regressor(net, noise=0.1).predict(X)
    assert several.acquire(1)[0] == several.epistemic.sum(1).argmax()


# -- pandas, repr, errors


def test_a_table(net: pg.Streamlined) -> None:
    pytest.importorskip("pandas")
    found = pg.Classifier(net).predict(X)
    table = found.to_pandas()
    assert list(table.columns) == [
        *(f"probabilities_{c}" for c in range(3)),
        *("prediction", "entropy", "epistemic", "aleatoric", "latent_variance"),
    ]
    assert len(table) == 11 and np.array_equal(table["probabilities_1"], found.probabilities[:, 1])
    single = Predictions({"mean": np.ones((2, 1)), "stddev": np.ones((2, 1))}, "regression")
    assert list(single.to_pandas().columns) == ["mean", "stddev"]


def test_a_table_without_pandas(net: pg.Streamlined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pg.InputError, match="pip install pandas"):
        pg.Classifier(net).predict(X).to_pandas()


def test_what_they_say_of_themselves(net: pg.Streamlined) -> None:
    found = pg.Classifier(net).predict(X)
    assert repr(found).startswith("Predictions(11 inputs, likelihood='classification': probabilities [11, 3], pred")
    assert "probabilities" in dir(found) and not hasattr(found, "mean")
    with pytest.raises(AttributeError, match="have no 'mean': there are probabilities, prediction"):
        found.mean  # noqa: B018


BAD: dict[str, tuple[Callable[[pg.Streamlined], Any], str]] = {
    "interval of classes": (lambda n: pg.Classifier(n).predict(X).interval(0.9), r"no intervals: \.set\(level\)"),
    "set of values": (lambda n: pg.Regressor(n, noise=1.0).predict(X).set(0.9), r"use \.interval\(level\)"),
    "interval of counts": (lambda n: Predictor(n, PoissonLikelihood()).predict(X).interval(), "normal.*quantiles"),
    "level": (lambda n: pg.Regressor(n, noise=1.0).predict(X).interval(1), "level is 1; it must be a probability"),
    "count": (lambda n: pg.Classifier(n).predict(X).acquire(12), "count is 12"),
    "by": (lambda n: pg.Classifier(n).predict(X).acquire(1, "stddev"), "by is 'stddev'; it must be 'epistemic'"),
    "text": (lambda n: pg.Classifier(n).predict(np.array(["a"])), "array of <U1; numbers are needed"),
    "nothing": (lambda n: pg.Classifier(n).predict([]), "there are no data"),
    "batch_size": (lambda n: pg.Classifier(n).predict(X, batch_size=0), "batch_size is 0"),
    "progress": (lambda n: pg.Classifier(n).predict(X, progress=3), "progress is 3"),
    "width": (lambda n: pg.Classifier(n).predict(X[:, :2]), r"shape \(11, 2\)"),
    "lengths": (
        lambda n: Predictions.joined([{"mean": np.ones((2, 3))}, {"mean": np.ones((2, 4))}], "regression", True),
        r"shape \(2, 3\) in batch 0 and \(2, 4\) in batch 1.*pad",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case: str, net: pg.Streamlined) -> None:
    make, match = BAD[case]
    with pytest.raises(pg.InputError, match=match):
        make(net)
