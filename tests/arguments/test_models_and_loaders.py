"""Wrong models and loaders, wherever they may be given."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import propagauss as pg
from arguments.given import EYE, NAN, X, Y, mlp, with_weight
from propagauss import baselines

# -- models

MODELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "None": (lambda t: None, "nn.Module, but is None"),
    "a class": (lambda t: nn.Linear, "nn.Module, but is the class Linear: make one"),
    "a function": (lambda t: lambda x: x, "nn.Module, but is a function"),
    "a state dict": (lambda t: t.model.state_dict(), "nn.Module, but is"),
    "a trainer": (lambda t: SimpleNamespace(model=t.model), r"nn.Module, but is .*: give its \.model, in evaluation"),
    "DataParallel": (lambda t: nn.DataParallel(t.model), r"DataParallel: give the model inside, model\.module"),
    "scripted": (lambda t: torch.jit.script(t.model), "ScriptModule.*nn.Module that it was made from"),
    "traced": (lambda t: torch.jit.trace(t.model, X), "ScriptModule.*nn.Module that it was made from"),
    "meta": (lambda t: nn.Linear(3, 2, device="meta"), "'weight' of the model is on the meta device"),
    "sparse": (lambda t: with_weight(lambda w: w.to_sparse()), r"'weight' of the model is a sparse.*to_dense"),
    "lazy": (lambda t: nn.LazyLinear(2), "no shape yet: call a lazy model once"),
    "quantised": (
        lambda t: torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear}, torch.qint8),
        "quantised.*give the one it was made from",
    ),
}
TAKES_MODEL: dict[str, Callable[[Any, Any], Any]] = {
    "streamline": lambda t, m: pg.streamline(m, t.posterior, X),
    "linearise": lambda t, m: pg.linearise(m, t.posterior, X),
    "fit_laplace": lambda t, m: pg.fit_laplace(m, [(X, Y)]),
    "from_swag": lambda t, m: pg.from_swag(t.snapshots, m),
    "baselines.MonteCarlo": lambda t, m: baselines.MonteCarlo(m, t.posterior),
    "baselines.GLM": lambda t, m: baselines.GLM(m, t.posterior),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("place", TAKES_MODEL)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_models(place: str, kind: str, t: SimpleNamespace) -> None:
    make, match = MODELS[kind]
    with pytest.raises(pg.PropagaussError, match=match):
        TAKES_MODEL[place](t, make(t))


# -- loaders

LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, r"the loader is None.*\[\(x, y\)\]"),
    "a number": (lambda: 5, "the loader is 5"),
    "numpy": (X.numpy, r"the loader is a NumPy array of shape \(4, 3\)"),
    "a tensor": (lambda: X, "the loader is a tensor"),
    "text": (lambda: "data.csv", "the loader is 'data.csv'"),
    "a dictionary": (lambda: {"x": X}, "the loader is a dict"),
    "a class": (lambda: DataLoader, "the loader is the class DataLoader"),
    "a dataset": (lambda: TensorDataset(X, Y), r"is a dataset.*DataLoader\(dataset"),
    "one pair": (lambda: (X, Y), r"batch 0: the loader yields a tensor.*give \[\(x, y\)\]"),
    "inputs alone": (lambda: [X], r"batch 0: the loader yields a tensor.*\(x, y\)"),
    "triples": (lambda: [(X, Y, Y)], "batch 0: the loader yields a tuple of 3"),
    "dictionaries": (lambda: [{"x": X, "y": Y}], r"yields a dict of 2.*yield \(inputs, labels\)"),
    "None in it": (lambda: [None], "batch 0: the loader yields None"),
    "pairs of None": (lambda: [(None, Y)], "batch 0: x of the pair .* is None"),
    "numpy labels": (lambda: [(X, Y.numpy())], "batch 0: y of the pair .* is a NumPy array.*torch.as_tensor"),
    "lists of labels": (lambda: [(X, Y.tolist())], "batch 0: y of the pair .* is a list of 4.*torch.as_tensor"),
    "sparse labels": (lambda: [(X, Y.to_sparse())], r"batch 0: y of the pair .* sparse.*\.to_dense\(\)"),
    "meta labels": (lambda: [(X, Y.to("meta"))], "batch 0: y of the pair .* meta device"),
    "a single label": (lambda: [(X, torch.tensor(1))], "y of the pair .* has no batch dimension"),
    "swapped": (lambda: [(Y, X)], r"int64.*(\(x, y\) rather than \(y, x\)|streamlined for torch.float32)"),
    "double": (lambda: [(X.double(), Y)], "float64.*float32.*convert"),
    "half": (lambda: [(X.half(), Y)], "float16.*float32.*convert"),
    "other width": (lambda: [(X[:, :2], Y)], r"(on|shape).* \(4, 2\)"),
    "empty": (list, "the loader is empty"),
    "without points": (lambda: [(X[:0], Y[:0])], "the loader is empty"),
    "used up": (lambda: iter([]), "the loader is empty"),
    "NaN": (lambda: [(X * NAN, Y)], "not finite"),
    "float labels": (lambda: [(X, Y.float())], "labels .*integers"),
    "one-hot": (lambda: [(X, EYE[Y])], "labels .*integers"),
    "other labels": (lambda: [(X, Y + 5)], "labels (range|go) from 5 to 6"),
    "negative labels": (lambda: [(X, Y - 1)], "labels (range|go) from -1"),
    "fewer labels": (lambda: [(X, Y[:2])], r"labels have shape \(2,\)"),
}
TAKES_LOADER: dict[str, Callable[[Any, Any], Any]] = {
    "fit_laplace": lambda t, loader: pg.fit_laplace(t.model, loader),
    "Classifier.fit_scale": lambda t, loader: pg.Classifier(t.net).fit_scale(loader, progress=False),
    "TemperatureScaling.fit": lambda t, loader: baselines.TemperatureScaling(t.model).fit(loader, progress=False),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("place", TAKES_LOADER)
def test_loaders(place: str, kind: str, t: SimpleNamespace) -> None:
    make, match = LOADERS[kind]
    with pytest.raises(pg.InputError, match=match):
        TAKES_LOADER[place](t, make())
