"""Tensors that ops cannot read, and wrong numbers and words, wherever they may be given."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import propagauss as pg
from arguments.given import EYE, INF, NAN, PROBS, TARGETS, V, X, Y, fidelity, nested, quantised
from propagauss import baselines, links, metrics, tasks

# -- tensors that ops cannot read, wherever they may be given

ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "nested": (nested, "nested tensor.*to_padded_tensor"),
    "sparse": (lambda: X.to_sparse(), r"sparse tensor.*\.to_dense\(\)"),
    "MKL-DNN": (lambda: X.to_mkldnn(), r"MKL-DNN tensor.*\.to_dense\(\)"),
    "quantised": (quantised, r"quantised tensor.*\.dequantize\(\)"),
    "meta": (lambda: X.to("meta"), "meta device.*no values"),
    "numpy": (X.numpy, r"NumPy array of shape \(4, 3\).*torch\.as_tensor"),
    "None": (lambda: None, "None"),
    "text": (lambda: "abc", "'abc'"),
}
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "Gaussian": lambda t, x: pg.Gaussian(x, X.square()),
    "DiagonalPosterior": lambda t, x: pg.DiagonalPosterior({"0.weight": x}),
    "LowRankPosterior": lambda t, x: pg.LowRankPosterior({"a": V}, {"a": x}),
    "KroneckerPosterior": lambda t, x: pg.KroneckerPosterior({"a": (x,)}),
    "FullPosterior": lambda t, x: pg.FullPosterior(["a"], x),
    "linearise": lambda t, x: pg.linearise(t.model, t.posterior, x),
    "Streamlined": lambda t, x: t.net(x),
    "Classifier": lambda t, x: t.classifier(x),
    "Regressor": lambda t, x: t.regressor(x),
    "fit_laplace": lambda t, x: pg.fit_laplace(t.model, [(x, Y)]),
    "metrics.accuracy": lambda t, x: metrics.accuracy(x, Y),
    "metrics.predictive_entropy": lambda t, x: metrics.predictive_entropy(x),
    "links.probit": lambda t, x: links.probit(x, X.square()),
    "links.monte_carlo": lambda t, x: links.monte_carlo(x, X.square()),
    "links.categorical": lambda t, x: links.categorical(x),
    "tasks.sensitivity": lambda t, x: tasks.sensitivity.estimate(t.uncertain, x, Y, progress=False),
    "tasks.linearity": lambda t, x: tasks.linearity.error(t.model, x),
    "tasks.ood": lambda t, x: tasks.ood.from_samples(x),
    "tasks.fidelity": lambda t, x: fidelity(t, inputs=x),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_cannot_be_read(place: str, kind: str, t: SimpleNamespace) -> None:
    make, match = ODD[kind]
    with pytest.raises(pg.PropagaussError, match=match):
        PLACES[place](t, make())


# -- numbers, whole numbers and words, wherever they may be given

NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "Classifier scale": lambda t, v: pg.Classifier(t.net, scale=v),
    "Regressor scale": lambda t, v: setattr(pg.Regressor(t.net), "scale", v),
    "BinaryClassifier temperature": lambda t, v: pg.BinaryClassifier(t.net, temperature=v),
    "HeteroscedasticRegressor noise_factor": lambda t, v: pg.HeteroscedasticRegressor(t.net, noise_factor=v),
    "fit_laplace prior_precision": lambda t, v: pg.fit_laplace(t.model, [(X, Y)], prior_precision=v),
    "fit_laplace noise": lambda t, v: pg.fit_laplace(t.model, [(X, TARGETS)], "regression", noise=v),
    "KroneckerPosterior prior_precision": lambda t, v: pg.KroneckerPosterior({"a": (EYE,)}, prior_precision=v),
    "baselines.TemperatureScaling": lambda t, v: baselines.TemperatureScaling(t.model, v),
    "tasks.sensitivity tolerance": lambda t, v: tasks.sensitivity.estimate(t.uncertain, X, Y, tolerance=v),
    "tasks.ood bandwidth": lambda t, v: tasks.ood.density(V, V, v),
    "Posterior scale": lambda t, v: t.posterior.scale(v),
    "streamline variance_tolerance": lambda t, v: pg.streamline(t.model, t.posterior, X, variance_tolerance=v),
}


@pytest.mark.parametrize("value", ["a", None, -1, NAN, INF, [1.0], V, 1j, True, np.ones(2)], ids=repr)
@pytest.mark.parametrize("place", NUMBERS)
def test_numbers(place: str, value: Any, t: SimpleNamespace) -> None:
    with pytest.raises(pg.PropagaussError, match=r" is .*(positive|negative|at least 0)"):
        NUMBERS[place](t, value)


WHOLE: dict[str, Callable[[Any, Any], Any]] = {
    "Classifier samples": lambda t, v: pg.Classifier(t.net, samples=v),
    "links.monte_carlo samples": lambda t, v: links.monte_carlo(X, X.square(), samples=v),
    "links.monte_carlo seed": lambda t, v: links.monte_carlo(X, X.square(), seed=v),
    "baselines.MonteCarlo samples": lambda t, v: baselines.MonteCarlo(t.model, t.posterior, samples=v),
    "baselines.MonteCarlo seed": lambda t, v: baselines.MonteCarlo(t.model, t.posterior, seed=v),
    "baselines.GLM chunk": lambda t, v: baselines.GLM(t.model, t.posterior, chunk=v if v is not None else "none"),
    "metrics.ece bins": lambda t, v: metrics.ece(PROBS, Y, bins=v),
    "tasks.fidelity batch_size": lambda t, v: fidelity(t, batch_size=v),
    "tasks.ood samples": lambda t, v: tasks.ood.scores(t.classifier, X, samples=v),
    "tasks.sensitivity max_steps": lambda t, v: tasks.sensitivity.estimate(t.uncertain, X, Y, max_steps=v),
    "tasks.linearity samples": lambda t, v: tasks.linearity.against_samples(t.net, t.model, t.posterior, X, samples=v),
    "from_swag rank": lambda t, v: pg.from_swag(t.snapshots, t.model, rank=v),
    "Posterior sample": lambda t, v: t.posterior.sample(v),
    "Gaussian sample": lambda t, v: pg.Gaussian(X, X.square()).sample((v,)),
}


@pytest.mark.parametrize("value", ["a", None, -1, 1.5, NAN, [3], True], ids=repr)
@pytest.mark.parametrize("place", WHOLE)
def test_whole_numbers(place: str, value: Any, t: SimpleNamespace) -> None:
    with pytest.raises(pg.PropagaussError, match=r" is .*; it must be a whole number of at least \d"):
        WHOLE[place](t, value)


WORDS: dict[str, Callable[[Any, Any], Any]] = {
    "streamline covariance": lambda t, v: pg.streamline(t.model, t.posterior, X, covariance=v),
    "linearise covariance": lambda t, v: pg.linearise(t.model, t.posterior, X, covariance=v),
    "fit_laplace likelihood": lambda t, v: pg.fit_laplace(t.model, [(X, Y)], likelihood=v),
    "fit_laplace structure": lambda t, v: pg.fit_laplace(t.model, [(X, Y)], structure=v),
    "KroneckerPosterior damping": lambda t, v: pg.KroneckerPosterior({"a": (EYE,)}, damping=v),
    "KroneckerPosterior flatten": lambda t, v: pg.KroneckerPosterior({"a": (EYE,)}, flatten=v),
    "Classifier link": lambda t, v: pg.Classifier(t.net, link=v),
    "baselines.MonteCarlo covariance": lambda t, v: baselines.MonteCarlo(t.model, t.posterior, covariance=v),
    "baselines.GLM covariance": lambda t, v: baselines.GLM(t.model, t.posterior, covariance=v),
}


@pytest.mark.parametrize("value", ["nope", None, 5, True, ["full"]], ids=repr)
@pytest.mark.parametrize("place", WORDS)
def test_words(place: str, value: Any, t: SimpleNamespace) -> None:
    with pytest.raises(pg.PropagaussError, match=r"it must be '|there is no link .*there are probit"):
        WORDS[place](t, value)
