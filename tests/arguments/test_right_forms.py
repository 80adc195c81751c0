"""Right arguments, in every form in which numbers, names, loaders and files come."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

import propagauss as pg
from arguments.given import EYE, PROBS, TARGETS, Then, V, X, Y
from arguments.test_models_and_loaders import TAKES_LOADER
from propagauss import baselines, metrics

ONE: list[Any] = [1, 1.0, np.float32(1), np.float64(1), np.int64(1), torch.tensor(1.0), torch.tensor(1), np.array(1.0)]


@pytest.mark.parametrize("value", ONE, ids=lambda v: f"{type(v).__name__} {v!r}")
def test_numbers_in_every_form(value: Any, t: SimpleNamespace) -> None:
    assert pg.Classifier(t.net, scale=value).scale == 1.0
    assert pg.Regressor(t.net, noise=value).noise == 1.0
    assert pg.fit_laplace(t.model, [(X, Y)], prior_precision=value).details["prior_precision"] == 1.0
    assert torch.equal(pg.KroneckerPosterior({"a": (EYE,)}, value).to_dense(), 0.5 * EYE)
    assert torch.equal(t.posterior.scale(value).variance("0.bias"), t.posterior.variance("0.bias"))
    assert baselines.TemperatureScaling(t.model, value).temperature == 1.0


@pytest.mark.parametrize("value", [2, np.int32(2), np.int64(2), torch.tensor(2)], ids=lambda v: type(v).__name__)
def test_whole_numbers_in_every_form(value: Any, t: SimpleNamespace) -> None:
    assert t.posterior.sample(value)["0.bias"].shape == (2, 4)
    assert baselines.MonteCarlo(t.model, t.posterior, samples=value).latents(X).shape == (2, 4, 2)
    assert pg.Classifier(t.net, "monte_carlo", samples=value)(X).probs.shape == (4, 2)
    assert metrics.ece(PROBS, Y, bins=value) >= 0


def test_names_and_files_in_every_form(t: SimpleNamespace, tmp_path: Path) -> None:
    for names in ("0.*", ["0.*"], ("0.weight", "0.bias"), {"0.*"}, (n for n in ["0.*"]), dict.fromkeys(["0.*"])):
        assert pg.fit_laplace(t.model, [(X, Y)], parameters=names).names == ("0.weight", "0.bias")
    for given in (["0.weight"], ("0.weight",), {"0.weight": 1}.keys()):
        assert t.posterior.select(given).names == ("0.weight",)
    for path in (tmp_path / "p.safetensors", str(tmp_path / "q")):
        t.posterior.save(path)
        assert pg.load_posterior(path, torch.device("cpu")).names == t.posterior.names


@pytest.mark.parametrize(
    "noise", [0, [0.1, 0.2], (0.1, 0.2), np.array([0.1, 0.2]), V, V.bfloat16(), Y[:2], nn.Parameter(V)], ids=str
)
def test_noises(noise: Any, t: SimpleNamespace) -> None:
    assert pg.Regressor(t.net, noise)(X).mean.shape == (4, 2)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: [(X, Y)],
        lambda: [[X, Y]],
        lambda: ((X, Y) for _ in range(1)),
        lambda: DataLoader(TensorDataset(X, Y), batch_size=2),
        lambda: [((X,), Y)],
        lambda: [({"input": X}, Y)],
        lambda: [(X, Y.int())],
        lambda: [(X, Y.to(torch.uint64))],
        lambda: [(X, Y), (X[:0], Y[:0])],
        lambda: {1: (X, Y)}.values(),
    ],
)
def test_loaders_in_every_form(loader: Callable[[], Any], t: SimpleNamespace) -> None:
    expected = pg.fit_laplace(t.model, [(X, Y)], prior_precision=1.0)
    found = pg.fit_laplace(t.model, loader(), prior_precision=1.0)
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    baselines.TemperatureScaling(t.model).fit(loader(), progress=False)


class Started(DataLoader[Any]):
    """Counts how often it is started, which may start processes and always draws a random number."""

    count = 0

    def __iter__(self) -> Any:
        self.count += 1
        return super().__iter__()


@pytest.mark.parametrize("place", TAKES_LOADER)
def test_a_loader_is_started_once(place: str, t: SimpleNamespace) -> None:
    loader = Started(TensorDataset(X, Y), batch_size=2)
    TAKES_LOADER[place](t, loader)
    assert loader.count == 1


def test_a_compiled_model_is_the_model_inside(t: SimpleNamespace) -> None:
    compiled: Any = torch.compile(t.model, backend="eager")  # a compiler would take seconds to start, for nothing
    posterior = pg.fit_laplace(compiled, [(X, Y)])
    assert posterior.names == t.posterior.names
    for engine in (pg.streamline, pg.linearise):
        assert torch.equal(engine(compiled, posterior, X)(X).mean, engine(t.model, posterior, X)(X).mean)
    assert pg.from_swag(t.snapshots, compiled, rank=0).names == t.posterior.names


def test_a_scripted_model_has_baselines(t: SimpleNamespace) -> None:
    """They only call it."""
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(t.model)
    torch.testing.assert_close(baselines.MAP(scripted)(X).mean, t.model(X))


def test_a_model_that_converts_its_input() -> None:
    model = Then(lambda h: h)
    model.forward = lambda x: model.layer(x.float())  # type: ignore[method-assign]
    pg.fit_laplace(model, [(X.double(), Y)])


def test_half_precision_covariances() -> None:
    half = pg.FullPosterior(["a"], EYE.half()).bind({"a": V.half()})
    assert half.sample(3)["a"].dtype == torch.float16


def test_predictions_in_every_form() -> None:
    for predictive in (PROBS, Categorical(PROBS), PROBS.double(), PROBS.requires_grad_(False)):
        assert metrics.accuracy(predictive, Y) == 1.0 and metrics.accuracy(predictive, Y.int()) == 1.0
    assert metrics.auroc(V.cumsum(0), torch.tensor([False, True])) == 1.0
    assert metrics.rmse(TARGETS, TARGETS.double()) == 0.0


@pytest.mark.parametrize("change", [lambda a: a[::-1][::-1], lambda a: a.astype(">f8"), np.asfortranarray, np.ma.array])
def test_arrays_in_every_form(change: Callable[[Any], Any], t: SimpleNamespace) -> None:
    """However the numbers lie in memory."""
    expected = t.classifier.predict(X, progress=False).probabilities
    np.testing.assert_array_equal(t.classifier.predict(change(X.numpy()), progress=False).probabilities, expected)
    scores = np.array([0.1, 0.3, 0.2])
    right = scores > 0.15
    assert metrics.aurc(change(scores)[::-1], right[::-1]) == metrics.aurc(scores[::-1].copy(), right[::-1].copy())
