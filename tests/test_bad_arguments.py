"""Wrong arguments of everything public: one error of ours that says what it is, where, and what to do.

A row is the public name, what is wrong, the call and a pattern of the message. Right ones are below.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, Poisson
from torch.utils.data import DataLoader, TensorDataset

import propagauss as pg
from propagauss import baselines, links, metrics, tasks

NAN, INF = math.nan, math.inf
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0])
TARGETS = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
PROBS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.6, 0.4]])
EYE = torch.eye(2)
V = torch.ones(2)


class Then(nn.Module):
    """A layer, then any function."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 2), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def drawn(h: Tensor) -> Tensor:
    return h + torch.randn(2, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged)


def quantised() -> Tensor:
    return torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)


def broken() -> nn.Module:
    model = mlp()
    model[0].weight.data.fill_(NAN)
    return model


def with_weight(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(change(model.weight.detach()))
    return model


@pytest.fixture(scope="module")
def t(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What the calls are made with."""
    model = mlp()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in model.named_parameters()})
    net = pg.streamline(model, posterior, X)
    folder = tmp_path_factory.mktemp("files")
    (folder / "folder.pt2").mkdir()
    (folder / "junk.safetensors").write_bytes(b"junk")
    return SimpleNamespace(
        model=model,
        posterior=posterior,
        net=net,
        uncertain=pg.streamline(model, None, pg.Gaussian(X, X.square())),
        classifier=pg.Classifier(net),
        regressor=pg.Regressor(net, noise=0.1),
        montecarlo=baselines.MonteCarlo(model, posterior, samples=3),
        glm=baselines.GLM(model, posterior),
        snapshots=[{n: p.detach() + i for n, p in model.named_parameters()} for i in (-1, 0, 1)],
        scores=tasks.ood.from_probs(PROBS),
        folder=folder,
    )


def fidelity(t: Any, **given: Any) -> Any:
    right = {"net": t.net, "model": t.model, "posterior": t.posterior, "inputs": X, "progress": False}
    return tasks.fidelity(**{**right, **given})


Row = tuple[str, str, Callable[[Any], Any], str]
ROWS: list[Row] = []


def add(name: str, *rows: tuple[str, Callable[[Any], Any], str]) -> None:
    ROWS.extend((name, what, call, match) for what, call, match in rows)


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


# -- what is particular to each name

add(
    "streamline",
    ("text as the example", lambda t: pg.streamline(t.model, t.posterior, "x"), "no tensor.*but 'x'.*loader"),
    ("a loader", lambda t: pg.streamline(t.model, t.posterior, DataLoader([1])), "no tensor.*a DataLoader"),
    ("nested", lambda t: pg.streamline(t.model, t.posterior, nested()), "input 0 of the example is a nested"),
    ("MKL-DNN", lambda t: pg.streamline(t.model, t.posterior, X.to_mkldnn()), "input 0 of the example is an MKL"),
    ("a dictionary", lambda t: pg.streamline(t.model, {"a": V}, X), "posterior is a dict.*DiagonalPosterior"),
    ("a path", lambda t: pg.streamline(t.model, "p.safetensors", X), "posterior is 'p.saf.*load_posterior"),
    ("swapped", lambda t: pg.streamline(t.posterior, t.model, X), "nn.Module, but is a DiagonalPosterior"),
    ("check", lambda t: pg.streamline(t.model, t.posterior, X, check="yes"), "check is 'yes'.*True or False"),
    ("twice", lambda t: pg.streamline(t.net, None, X), "rewritten already"),
    ("a generator", lambda t: pg.streamline(Then(drawn), None, X), "uses a Generator for aten.randn.* as an input"),
    ("output", lambda t: pg.streamline(t.model, t.posterior, X, output="a"), "returns a tensor, which has no 'a'"),
    ("integers", lambda t: pg.streamline(t.model, t.posterior, Y), r"example: .*int64.*holds integers.*\.float\(\)"),
    ("width", lambda t: pg.streamline(t.model, t.posterior, X[:, :2]), r"example: .*not run on .*\(4, 2\)"),
    ("a number", lambda t: pg.streamline(t.model, t.posterior, X[0, 0]), r"no tensor with a batch.*\[batch"),
    ("a classifier", lambda t: pg.streamline(t.classifier, None, X), "rewritten already"),
)
add(
    "linearise",
    ("complex", lambda t: pg.linearise(t.model, t.posterior, X.to(torch.complex64)), "does not run on.*complex64"),
    ("outputs", lambda t: pg.linearise(t.model, t.posterior, X, outputs="all"), "outputs is 'all'"),
    ("outputs zero", lambda t: pg.linearise(t.model, t.posterior, X, outputs=0), "outputs is 0.*at least 1"),
    ("outputs flag", lambda t: pg.linearise(t.model, t.posterior, X, outputs=True), "outputs is True"),
    ("outputs none", lambda t: pg.linearise(t.model, t.posterior, X, outputs=[]), "outputs is an empty list"),
    ("outputs text", lambda t: pg.linearise(t.model, t.posterior, X, outputs=["a"]), "outputs holds 'a'"),
    ("outputs tensor", lambda t: pg.linearise(t.model, t.posterior, X, outputs=Y), r"a tensor of shape \(4,\)"),
    ("outputs beyond", lambda t: pg.linearise(t.model, t.posterior, X, outputs=[99]), "holds 99.* from 0 to 1"),
    ("posterior", lambda t: pg.linearise(t.model, {"a": V}, X), "posterior is a dict.*DiagonalPosterior"),
    ("twice", lambda t: pg.linearise(t.net, None, X), "rewritten already"),
    ("complex output", lambda t: pg.linearise(Then(torch.fft.fft), None, X), "complex numbers.*view_as_real"),
    ("sparse output", lambda t: pg.linearise(Then(Tensor.to_sparse), None, X), r"sparse tensor.*\.to_dense"),
    ("random", lambda t: pg.linearise(Then(lambda h: h + torch.randn(2)), None, X), "draws random numbers"),
    ("a generator", lambda t: pg.linearise(Then(drawn), None, X), "uses a Generator for aten.randn.* as an input"),
)
add(
    "Streamlined",
    ("two inputs", lambda t: t.net(X, X), "for 1 positional input, but was called with 2 positional inputs"),
    ("a name", lambda t: t.net(y=X), "for 1 positional input, but was called with y="),
    ("a list", lambda t: t.net(X.tolist()), "called with 4 positional|nested"),
)
add("Plan", ("unknown", lambda t: pg.streamline(t.model, None, X, output=3).plan, "output is 3; the name of a field"))
add(
    "Classifier",
    ("a posterior", lambda t: pg.Classifier(t.posterior), "map inputs to a Gaussian, but is a Diag"),
    ("a model", lambda t: pg.Classifier(t.model)(X), "net returned a tensor.*pg.streamline"),
    ("a latent", lambda t: t.classifier.log_probs_of(X), "returned a tensor.*a Gaussian is needed"),
    ("many samples", lambda t: pg.Classifier(t.net, samples=10**9), "at most 1,048,576"),
    ("1e30", lambda t: t.classifier(X * 1e30), "not finite.*rescale"),
    ("weights", lambda t: pg.Classifier(pg.streamline(broken(), t.posterior, X))(X), "weights that are not finite"),
    ("export None", lambda t: t.classifier.export(None), "path to export to is None.*name of a file"),
    ("export suffix", lambda t: t.classifier.export("m.txt"), r"'m.txt'.*\.pt2 or \.onnx"),
    ("export folder", lambda t: t.classifier.export(t.folder / "folder.pt2"), "is a folder"),
    ("export nowhere", lambda t: t.classifier.export(t.folder / "no" / "m.pt2"), "there is no folder .*make it"),
    ("export a long name", lambda t: t.classifier.export(t.folder / ("a" * 300 + ".pt2")), "cannot write .*too long"),
    ("predict a scalar", lambda t: t.classifier.predict(np.float32(3)), "no tensor with a batch dimension"),
    ("predict masked", lambda t: t.classifier.predict(np.ma.masked_less(X.numpy(), 0)), "masked.*fill or remove"),
    ("predict a table", lambda t: t.classifier.predict(pa.array([1.0])), r"a DoubleArray: .*\.to_numpy\(\)"),
    ("no labels", lambda t: pg.Classifier(t.net).calibrate([(X, Y * 0 - 100)], progress=False), "labels are -100"),
    ("export flag", lambda t: t.classifier.export(t.folder / "m.pt2", covariance="full"), "covariance is 'full'"),
)
add(
    "BinaryClassifier",
    ("link", lambda t: pg.BinaryClassifier(t.net, "mean_field"), "no link 'mean_field'.*probit, quadrature"),
    ("a model", lambda t: pg.BinaryClassifier(t.model)(X), "net returned a tensor.*pg.streamline"),
    ("labels", lambda t: pg.BinaryClassifier(t.net).fit_scale([(X, 2 * TARGETS)]), "labels of 0 and 1"),
)
add(
    "HeteroscedasticRegressor",
    ("a model", lambda t: pg.HeteroscedasticRegressor(t.model)(X), "net returned a tensor.*pg.streamline"),
    ("shape", lambda t: pg.HeteroscedasticRegressor(lambda x: pg.Gaussian(x, x**2))(X), r"needs outputs \[\.\.\., 2\]"),
)
add(
    "Regressor",
    ("noise text", lambda t: pg.Regressor(t.net, noise="a"), "noise is 'a'; it must be a standard deviation"),
    ("noise negative", lambda t: pg.Regressor(t.net, noise=[0.1, -1]), r"noise is \[0.1, -1.0\].*none negative"),
    ("noise NaN", lambda t: pg.Regressor(t.net, noise=NAN), "noise is nan"),
    ("noise complex", lambda t: pg.Regressor(t.net, noise=1j), "noise is 1j"),
    ("noise flag", lambda t: pg.Regressor(t.net, noise=True), "noise is True"),
    ("noise matrix", lambda t: pg.Regressor(t.net, noise=EYE), r"noise is a tensor of shape \(2, 2\)"),
    ("noise none", lambda t: pg.Regressor(t.net, noise=[]), "noise is a list of 0"),
    ("noise meta", lambda t: pg.Regressor(t.net, noise=V.to("meta")), "noise is on the meta device"),
    ("noises", lambda t: pg.Regressor(t.net, noise=torch.ones(3))(X), "3 noise levels"),
    ("fit_noise", lambda t: pg.Regressor(t.net).fit_scale([(X, TARGETS)], fit_noise="a"), "fit_noise is 'a'"),
    ("1e30", lambda t: t.regressor(X * 1e30), "not finite.*rescale"),
    ("NaN", lambda t: t.regressor(X * NAN), "input itself has 12 values that are not finite"),
)
add(
    "fit_laplace",
    ("no parameters", lambda t: pg.fit_laplace(t.model, [(X, Y)], parameters=[]), "empty list.*such as '0.weight'"),
    ("parameters None", lambda t: pg.fit_laplace(t.model, [(X, Y)], parameters=None), "parameters= holds None"),
    ("parameters", lambda t: pg.fit_laplace(t.model, [(X, Y)], parameters=[V]), "holds a tensor.*names or patterns"),
    ("distributed", lambda t: pg.fit_laplace(t.model, [(X, Y)], distributed="yes"), "distributed is 'yes'"),
    ("weights", lambda t: pg.fit_laplace(broken(), [(X, Y)]), "weights of '0.weight' are not: load"),
    ("1e30", lambda t: pg.fit_laplace(t.model, [(X * 1e30, Y)]), "not finite.*rescale"),
    ("NaN", lambda t: pg.fit_laplace(t.model, [(X * NAN, Y)]), "neither are its inputs: remove or impute"),
    ("complex", lambda t: pg.fit_laplace(nn.Linear(3, 2).to(torch.complex64), [(X, Y)]), "'weight' is torch.complex64"),
    ("complex output", lambda t: pg.fit_laplace(Then(lambda h: h + 1j), [(X, Y)]), "returns torch.complex64"),
    ("labels as output", lambda t: pg.fit_laplace(Then(lambda h: h.argmax(-1)), [(X, Y)]), "returns torch.int64"),
    ("no batch", lambda t: pg.fit_laplace(Then(lambda h: h.sum()), [(X, Y)]), r"needs outputs \[B, C\]"),
    ("an error", lambda t: pg.fit_laplace(Then(lambda h: 1 / 0), [(X, Y)]), "batch 0: .*ZeroDivisionError"),
    ("flags", lambda t: pg.fit_laplace(t.model, [(X, TARGETS > 0)], "regression"), r"torch.bool.*\.float\(\)"),
    ("swapped", lambda t: pg.fit_laplace([(X, Y)], t.model), "nn.Module, but is a list"),
)
add(
    "DiagonalPosterior",
    ("lists", lambda t: pg.DiagonalPosterior({"a": [1.0]}), "variance of 'a' is a list of 1.*as_tensor"),
    ("a number", lambda t: pg.DiagonalPosterior({"a": 1.0}), "variance of 'a' is 1.0.*as_tensor"),
    ("complex", lambda t: pg.DiagonalPosterior({"a": V + 1j}), r"'a' is torch.complex64.*\.real"),
    ("integers", lambda t: pg.DiagonalPosterior({"a": Y}), r"'a' is torch.int64.*\.float\(\)"),
    ("float8", lambda t: pg.DiagonalPosterior({"a": V.to(torch.float8_e5m2)}), r"float8.*\.float\(\)"),
    ("a list", lambda t: pg.DiagonalPosterior([V]), "variances are a list of 1; a dictionary"),
    ("a model", lambda t: pg.DiagonalPosterior(t.model), "variances are a Sequential; a dictionary"),
    ("names", lambda t: pg.DiagonalPosterior({1: V}), "the name 1; names of parameters are texts"),
)
add(
    "LowRankPosterior",
    ("None", lambda t: pg.LowRankPosterior(None, None), "variances are None; a dictionary"),
    ("a list", lambda t: pg.LowRankPosterior({"a": V}, [V]), "directions are a list of 1; a dictionary"),
)
add(
    "KroneckerPosterior",
    ("bare", lambda t: pg.KroneckerPosterior({"a": EYE}), r"factors of 'a' are a tensor.*give \(B, A\)"),
    ("None", lambda t: pg.KroneckerPosterior({"a": (EYE, None)}), "a Kronecker factor of 'a' is None"),
    ("three", lambda t: pg.KroneckerPosterior({"a": (EYE, EYE, EYE)}), "'a' has 3 Kronecker factors"),
    ("asymmetric", lambda t: pg.KroneckerPosterior({"a": (EYE.cumsum(1),)}), "'a' is not symmetric"),
    ("mixed", lambda t: pg.KroneckerPosterior({"a": (EYE, EYE.double())}), "mixed dtypes"),
    ("a list", lambda t: pg.KroneckerPosterior([EYE]), "factors are a list of 1; a dictionary"),
    ("precisions", lambda t: pg.KroneckerPosterior({"a": (EYE,)}, {"b": 1.0}), "has no entry for 'a'"),
)
add(
    "FullPosterior",
    ("complex", lambda t: pg.FullPosterior(["a"], EYE + 0j), r"complex64.*\.real"),
    ("NaN", lambda t: pg.FullPosterior(["a"], EYE * NAN), "not finite"),
    ("one name", lambda t: pg.FullPosterior("weight", EYE), "names is 'weight'; a list of names"),
    ("numbers", lambda t: pg.FullPosterior([5], EYE), "names is a list of 1; a list of names"),
    ("no names", lambda t: pg.FullPosterior([], EYE), "names no parameter"),
    ("shapes", lambda t: pg.FullPosterior(["a"], EYE, {"a": 2}), r"shape of 'a' is 2; sizes are needed"),
    ("other shapes", lambda t: pg.FullPosterior(["a"], EYE, {"b": (2,)}), "shapes has no entry for 'a'"),
)
add(
    "Posterior",
    ("select a number", lambda t: t.posterior.select(5), r"select\(\) holds 5.*such as '0.weight'"),
    ("select nothing", lambda t: t.posterior.select(), r"select\(\) is an empty list"),
    ("select none", lambda t: t.posterior.select([]), r"select\(\) is an empty list"),
    ("select bytes", lambda t: t.posterior.select(b"0.*"), r"select\(\) holds b'0.\*'"),
    ("select others", lambda t: t.posterior.select("1.*"), r"no parameter of the posterior matches '1.\*'"),
    ("variance", lambda t: t.posterior.variance("0.wieght"), "'0.wieght' is not .*did you mean '0.weight'"),
    ("covariance", lambda t: t.posterior.covariance(None), "None is not a parameter of this posterior"),
    ("bind", lambda t: t.posterior.bind(t.model), "parameters are a Sequential; a dictionary"),
    ("bind None", lambda t: t.posterior.bind(None), "parameters are None; a dictionary"),
    ("to", lambda t: t.posterior.to("float64"), r"cannot convert with to\('float64'\).*torch.float64"),
    ("to integers", lambda t: t.posterior.to(torch.int64), "torch.int64; floating-point"),
    ("to meta", lambda t: t.posterior.to("meta"), "meta device"),
    ("generator", lambda t: t.posterior.sample(2, generator=0), "generator is 0; give torch.Generator"),
    ("quadratic text", lambda t: t.posterior.quadratic(dict.fromkeys(t.posterior.names, "a")), "weight' is 'a'"),
    ("quadratic shape", lambda t: t.posterior.quadratic(dict.fromkeys(t.posterior.names, X)), r"\[B, C, \*shape\]"),
    ("save a long name", lambda t: t.posterior.save(t.folder / ("a" * 300)), "cannot write .*too long"),
    ("quadratic", lambda t: t.posterior.quadratic({}), "Jacobian of '0.weight' is missing"),
    ("save None", lambda t: t.posterior.save(None), "path of the posterior is None"),
    ("save nowhere", lambda t: t.posterior.save(t.folder / "no" / "p"), "there is no folder .*make it"),
    ("save folder", lambda t: t.posterior.save(t.folder), "is a folder: give the name of a file"),
    ("save a header", lambda t: pg.DiagonalPosterior({"__metadata__": V}).save(t.folder / "h"), "cannot hold: rename"),
    ("save empty", lambda t: t.posterior.save(""), "no name of a file"),
)
add(
    "load_posterior",
    ("None", lambda t: pg.load_posterior(None), "path of the posterior is None"),
    ("a number", lambda t: pg.load_posterior(5), "path of the posterior is 5"),
    ("bytes", lambda t: pg.load_posterior(b"x"), "path of the posterior is b'x'"),
    ("a posterior", lambda t: pg.load_posterior(t.posterior), "path of the posterior is a DiagonalPosterior"),
    ("a folder", lambda t: pg.load_posterior(t.folder), "is a folder"),
    ("long", lambda t: pg.load_posterior("a" * 300), "not a readable|no such file"),
    ("missing", lambda t: pg.load_posterior(t.folder / "no"), "no such file"),
    ("junk", lambda t: pg.load_posterior(t.folder / "junk.safetensors"), "not a readable safetensors"),
    ("device", lambda t: pg.load_posterior(t.folder / "no", "nope"), "device is 'nope', which cannot be used"),
)
add(
    "load",
    ("None", lambda t: pg.load(None), "path to load from is None"),
    ("a folder", lambda t: pg.load(t.folder), "is not a file"),
    ("missing", lambda t: pg.load(t.folder / "no.pt2"), "there is no file"),
    ("another kind", lambda t: pg.load(t.folder / "junk.safetensors"), "cannot be read as a model.*export or copy"),
)
add(
    "Predictions",
    ("level", lambda t: t.regressor.predict(X, progress=False).interval(95), "level is 95.*between 0 and 1"),
    ("count", lambda t: t.classifier.predict(X, progress=False).acquire(9), "count is 9.*at most 4"),
    ("by", lambda t: t.classifier.predict(X, progress=False).acquire(1, "variance"), "by is 'variance'; it must be '"),
)
add(
    "Gaussian",
    ("a list", lambda t: pg.Gaussian(X, [1.0]), "variance of a Gaussian is a list of 1.*as_tensor"),
    ("a number", lambda t: pg.Gaussian(X, 1.0), "variance of a Gaussian is 1.0.*as_tensor"),
    ("complex", lambda t: pg.Gaussian(X + 0j, X + 0j), "floating-point mean, got torch.complex64"),
    ("shape", lambda t: pg.Gaussian(X, X[:2].square()), "they must agree"),
    ("neither", lambda t: pg.Gaussian(X), "either variance= .* or covariance="),
    ("sample", lambda t: pg.Gaussian(X, X.square()).sample(5), r"shape of a sample is 5.*\(10,\)"),
    ("scale", lambda t: pg.Gaussian(X, X.square()).scale("a"), "factor of a covariance is 'a'"),
    ("scales", lambda t: pg.Gaussian(X, X.square()).scale(torch.ones(7)), "must be a single number"),
    ("generator", lambda t: pg.Gaussian(X, X.square()).sample((2,), generator=0), "generator is 0; give torch.Gen"),
    ("to", lambda t: pg.Gaussian(X, X.square()).to(torch.int64), "torch.int64; floating-point"),
)
add(
    "from_ivon",
    ("None", lambda t: pg.from_ivon(None, t.model), "reads the IVON optimiser.*NoneType"),
    ("SGD", lambda t: pg.from_ivon(torch.optim.SGD(t.model.parameters()), t.model), "reads the IVON.*SGD"),
)
add("from_laplace", ("None", lambda t: pg.from_laplace(None), "takes an object of laplace-torch"))
add(
    "from_swag",
    ("None", lambda t: pg.from_swag(None, t.model), "snapshots are None; a list of state dicts"),
    ("one", lambda t: pg.from_swag(t.snapshots[0], t.model), "snapshots are a dict of 4; a list"),
    ("models", lambda t: pg.from_swag([t.model], t.model), "entries of snapshot 0 are a Sequential"),
)
add(
    "rule",
    ("nothing", lambda t: pg.rule(), r"names no op.*@pg.rule\("),
    ("bare", lambda t: pg.rule(lambda x: x), "takes ops as they stand in a graph.*got a function"),
    ("a function", lambda t: pg.rule(torch.relu), "takes ops as they stand"),
    ("a name", lambda t: pg.rule("relu"), "takes ops as they stand.*got 'relu'"),
    ("None", lambda t: pg.rule(None), "takes ops as they stand.*got None"),
    ("no function", lambda t: pg.rule(torch.ops.aten.cosh.default)(5), "a rule is a function"),
)
NORMAL = Normal(TARGETS, torch.ones(4, 2))
add(
    "metrics.nlpd",
    ("no counts", lambda t: metrics.nlpd(Poisson(TARGETS.exp()), TARGETS), "a Poisson cannot take.*support"),
)
add("metrics.ece", ("many bins", lambda t: metrics.ece(PROBS, Y, bins=10**12), "bins is .*at most"))
for _name in ("accuracy", "brier", "ece", "nlpd"):
    _metric = getattr(metrics, _name)
    _given = PROBS.log() if _name == "nlpd" else PROBS
    add(
        f"metrics.{_name}",
        ("a list", lambda t, f=_metric: f(PROBS.tolist(), Y), "predictions is a list of 4.*as_tensor"),
        ("float labels", lambda t, f=_metric, p=_given: f(p, Y.float()), r"labels are torch.float32.*\.long\(\)"),
        ("a list of labels", lambda t, f=_metric, p=_given: f(p, Y.tolist()), "labels is a list of 4.*as_tensor"),
        ("fewer labels", lambda t, f=_metric, p=_given: f(p, Y[:2]), r"labels have shape \(2,\)"),
        ("other labels", lambda t, f=_metric, p=_given: f(p, Y + 5), "labels range from 5"),
        ("nothing", lambda t, f=_metric, p=_given: f(p[:0], Y[:0]), "empty"),
        ("complex", lambda t, f=_metric: f(PROBS + 0j, Y), "complex64; real numbers"),
        ("NaN", lambda t, f=_metric: f(PROBS * NAN, Y), "NaN|sum to one|log-probabilities"),
    )
add(
    "metrics.predictive_entropy",
    ("logits", lambda t: metrics.predictive_entropy(PROBS * 5), r"sum to one: use logits\.softmax"),
    ("a normal", lambda t: metrics.predictive_entropy(NORMAL), "predictions are a Normal; give a Categorical"),
)
add(
    "metrics.rmse",
    ("a list", lambda t: metrics.rmse(NORMAL, TARGETS.tolist()), "targets is a list of 4.*as_tensor"),
    ("NaN", lambda t: metrics.rmse(TARGETS * NAN, TARGETS), "predictions have NaN"),
    ("shape", lambda t: metrics.rmse(NORMAL, TARGETS[:, :1]), "they must agree"),
)
add(
    "metrics.auroc",
    ("lists", lambda t: metrics.auroc([0.1, 0.2], [0, 1]), "scores is a list of 2.*as_tensor"),
    ("kinds", lambda t: metrics.auroc(V, torch.tensor([0, 2])), "0 and 1 only"),
    ("None", lambda t: metrics.auroc(V, None), "is_positive is None"),
)
for _name in ("aurc", "risk_coverage", "coverage_at_risk"):
    _more = (0.1,) if _name == "coverage_at_risk" else ()
    _curve = getattr(metrics, _name)
    add(
        f"metrics.{_name}",
        ("lists", lambda t, f=_curve, m=_more: f([0.1], [1], *m), "confidences is a list of 1.*as_tensor"),
        ("nothing", lambda t, f=_curve, m=_more: f(V[:0], V[:0], *m), "empty"),
        ("kinds", lambda t, f=_curve, m=_more: f(V, V * NAN, *m), "0 and 1 only: give prediction == label"),
        ("NaN", lambda t, f=_curve, m=_more: f(V * NAN, V, *m), "NaN values, which cannot be ranked"),
    )
add(
    "metrics.coverage_at_risk",
    ("risk", lambda t: metrics.coverage_at_risk(V, V, 1.5), "risk is 1.5.*between 0 and 1"),
)
for _name in ("probit", "mean_field", "monte_carlo", "bridge"):
    _link = getattr(links, _name)
    add(
        f"links.{_name}",
        ("a list", lambda t, f=_link: f([1.0, 2.0], V), "mean of the logits is a list of 2.*as_tensor"),
        ("variances", lambda t, f=_link: f(X, None), "covariance of the logits is None"),
        ("rows", lambda t, f=_link: f(X, X[:2]), r"shape \(4, 3\) and their covariance \(2, 3\)"),
        ("integers", lambda t, f=_link: f(Y, Y), r"torch.int64.*\.float\(\)"),
        ("no classes", lambda t, f=_link: f(torch.tensor(1.0), torch.tensor(1.0)), "no dimensions"),
    )
add(
    "links.monte_carlo",
    ("indefinite", lambda t: links.monte_carlo(X, -torch.ones(4, 3, 3)), "not positive semi-definite"),
)
add("links.categorical", ("NaN", lambda t: links.categorical(X * NAN), "logits have NaN values"))
for _name, _made in (("MAP", lambda t: baselines.MAP(t.model)), ("GLM", lambda t: t.glm)):
    add(
        f"baselines.{_name}",
        ("double", lambda t, f=_made: f(t)(X.double()), "input is torch.float64, the model torch.float32"),
        ("numpy", lambda t, f=_made: f(t)(X.numpy()), "does not run on a NumPy array"),
        ("width", lambda t, f=_made: f(t)(X[:, :2]), r"does not run on a tensor of shape \(4, 2\)"),
        ("nothing", lambda t, f=_made: f(t)(), "does not run on no inputs"),
    )
add(
    "baselines.MonteCarlo",
    ("None", lambda t: baselines.MonteCarlo(t.model, None), "posterior is None; give a DiagonalPosterior"),
    ("double", lambda t: t.montecarlo(X.double()), "input is torch.float64, the model torch.float32"),
    ("noise", lambda t: t.montecarlo.regress(X, "a"), "noise is 'a'"),
)
add("baselines.TemperatureScaling", ("None", lambda t: baselines.TemperatureScaling(None), "nn.Module, but is None"))
add(
    "Classifier.calibrate",
    ("tolerance", lambda t: pg.Classifier(t.net).calibrate([(X, Y)], tolerance=-1), "tolerance is -1.*not negative"),
    ("no loader", lambda t: pg.Classifier(t.net).calibrate(None), "the loader is None"),
    (
        "progress",
        lambda t: pg.Classifier(t.net).calibrate([(X, Y)], progress="bar"),
        "progress is 'bar'",
    ),
    ("temperature", lambda t: pg.Classifier(t.net, temperature=0), "temperature is 0.*positive"),
)
add(
    "tune",
    ("no model", lambda t: pg.tune(None, [(X, Y)], [(X, Y)]), "nn.Module, but is None"),
    ("likelihood", lambda t: pg.tune(t.model, [(X, Y)], [(X, Y)], "gamma"), "likelihood is 'gamma'"),
    ("budget", lambda t: pg.tune(t.model, [(X, Y)], [(X, Y)], budget="5"), "budget is '5'.*positive"),
    ("validation", lambda t: pg.tune(t.model, [(X, Y)], None), "the loader is None"),
    ("few points", lambda t: pg.tune(t.model, [(X, Y)], [(X, Y)]), "there are 4 validation points: give 10"),
)
add(
    "tasks.ood",
    ("a model", lambda t: tasks.ood.scores(t.posterior, X), "map inputs to a Gaussian, but is a Diag"),
    ("no loader", lambda t: tasks.ood.scores(t.classifier, None), "the loader is None"),
    ("a latent", lambda t: tasks.ood.mutual_information(X), "a Gaussian is needed"),
    ("lists", lambda t: tasks.ood.evaluate(V, [1.0]), "scores outside is a list of 1"),
    ("other scores", lambda t: tasks.ood.evaluate_all(V, t.scores), "scores inside are a tensor"),
    ("nothing to join", lambda t: tasks.ood.Scores.cat([]), "no scores to join"),
    ("joined", lambda t: tasks.ood.Scores.cat([None]), "no scores to join: give a list"),
    ("no points", lambda t: tasks.ood.density(V, V[:0]), "no points"),
    ("plot", lambda t: tasks.ood.plot(None), "nothing to plot: give a dictionary"),
    ("plots", lambda t: tasks.ood.plot({"a": V[0]}), "scores of 'a' are .*pair"),
)
add(
    "tasks.selective",
    ("nothing", lambda t: tasks.selective.plot({}), "nothing to plot: give a dictionary"),
    ("a curve", lambda t: tasks.selective.plot({"a": V}), "'a'"),
)
add(
    "tasks.sensitivity",
    ("labels", lambda t: tasks.sensitivity.estimate(t.uncertain, X, Y.tolist()), "labels is a list of 4"),
    ("a model", lambda t: tasks.sensitivity.estimate(t.model, X, Y), "does not take a Gaussian"),
    ("NaN", lambda t: tasks.sensitivity.estimate(t.uncertain, X * NAN, Y), "x has values that are not finite"),
)
add(
    "tasks.fidelity",
    ("a model", lambda t: fidelity(t, net=t.model), "network is a Sequential.*make it with pg.streamline"),
    ("a classifier", lambda t: fidelity(t, net=t.classifier), r"network is a Classifier.*pass its \.net"),
    ("a function", lambda t: fidelity(t, model=lambda x: x), "nn.Module, but is a function"),
    ("a dictionary", lambda t: fidelity(t, posterior={"a": V}), "posterior is a dict.*DiagonalPosterior"),
    ("by_parameter", lambda t: fidelity(t, by_parameter="yes"), "by_parameter is 'yes'.*True or False"),
    ("outputs", lambda t: fidelity(t, outputs="a"), "outputs is 'a'.*list of indices"),
    ("outputs beyond", lambda t: fidelity(t, outputs=[99]), "outputs holds 99"),
    ("NaN", lambda t: fidelity(t, inputs=X * NAN), "not finite"),
    ("width", lambda t: fidelity(t, inputs=X[:, :2]), r"shape \(4, 2\)"),
    ("row", lambda t: fidelity(t).by_parameter[None], "no row None"),
    ("rows", lambda t: fidelity(t).by_parameter[9], "no row 9"),
)
add(
    "tasks.linearity",
    ("no model", lambda t: tasks.linearity.error(None, X), "the model is None; a module or a function"),
    ("epsilons", lambda t: tasks.linearity.error(t.model, X, 0.1), "epsilons is 0.1; a list of numbers"),
    ("an epsilon", lambda t: tasks.linearity.error(t.model, X, ["a"]), "one of epsilons is 'a'"),
    ("NaN", lambda t: tasks.linearity.error(t.model, X * NAN), "x has values that are not finite"),
    ("layers", lambda t: tasks.linearity.layers(t.model, X), "needs a streamlined net"),
    ("net", lambda t: tasks.linearity.against_samples(None, t.model, t.posterior, X), "Gaussian, but is None"),
    ("posterior", lambda t: tasks.linearity.against_samples(t.net, t.model, None, X), "posterior is None"),
)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(("name", "what", "call", "match"), ROWS, ids=[f"{n}: {w}" for n, w, *_ in ROWS])
def test_what_is_particular(name: str, what: str, call: Callable[[Any], Any], match: str, t: SimpleNamespace) -> None:
    with pytest.raises(pg.PropagaussError, match=match) as caught:
        call(t)
    assert "\n" not in str(caught.value), "one sentence is enough"


def test_every_public_name_is_tried() -> None:
    tried = {name for name, *_ in ROWS} | {name.split(".")[0] for name, *_ in ROWS}
    errors = {n for n in pg.__all__ if n.endswith("Error")} | {"__version__"}
    assert set(pg.__all__) - errors <= tried
    for module in (metrics, links, baselines, tasks):
        name = module.__name__.removeprefix("propagauss.")
        public = {n for n in module.__all__ if n not in ("LINKS", "Link", "RiskCoverage")}
        assert {f"{name}.{n}" for n in public} <= tried


# -- right arguments, in every form in which numbers, names and files come

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
    compiled: Any = torch.compile(t.model)
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
