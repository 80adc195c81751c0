"""Bad input: one clear error of our own, before any forward runs, that names the thing and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

import propagauss as pg


class Recorder(nn.Module):
    """Counts the forwards that run on real numbers; tracing runs on fake ones."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body
        self.real = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(a, FakeTensor) for a in (*args, *kwargs.values())):
            self.real += 1
        return self.body(*args, **kwargs)


class Call(nn.Module):
    """A random layer, then any function."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def mlp(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), *extra, nn.ReLU(), nn.Linear(4, 2))


def variances(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.ones_like(p) for n, p in model.named_parameters()}


def diagonal(model: nn.Module) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior(variances(model))


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def refuse(
    model: nn.Module,
    match: str | None,
    posterior: Any = "all",
    example: Any = X,
    error: type[Exception] = pg.InputError,
    **options: Any,
) -> str:
    """`streamline` fails with `error`, without a real forward and without a trace on the model; returns the message."""
    recorder = Recorder(model)
    recorder.training = model.training
    if posterior == "all":
        posterior = diagonal(recorder)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(error, match=match) as caught:
        pg.streamline(recorder, posterior, example, **options)
    assert isinstance(caught.value, pg.PropagaussError)
    assert recorder.real == 0, "a forward ran"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return str(caught.value)


# -- training mode


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.2), nn.BatchNorm1d(4), nn.RReLU()],
    ids=lambda m: type(m).__name__,
)
def test_training_mode_where_it_matters(layer: nn.Module) -> None:
    message = refuse(mlp(nn.Sequential(nn.Identity(), layer)).train(), r"training mode.*model\.eval\(\)")
    assert "body.1.1" in message


def test_one_layer_left_in_training_mode() -> None:
    model = mlp(nn.Dropout(0.5), nn.Dropout(0.2)).eval()
    model[2].train()
    assert "body.2" in refuse(model, r"training mode.*eval")


def test_training_mode_is_refused_before_the_batch_statistics_change() -> None:
    """A model that cannot be traced with an open batch is run once to see what is wrong; not before this check."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)).reshape(2, 2, 3) if x.shape[0] == 4 else x

    refuse(Fixed().train(), "training mode")


@pytest.mark.parametrize(
    "layer", [nn.Identity(), nn.Dropout(0.0), nn.ReLU(), nn.Flatten()], ids=lambda m: type(m).__name__
)
def test_training_mode_where_it_does_not_matter(layer: nn.Module) -> None:
    model = mlp(layer).train()
    torch.testing.assert_close(pg.streamline(model, diagonal(model), X)(X).mean, model(X).detach())
    assert model.training


def test_batch_norm_without_statistics_mixes_the_batch_in_any_mode() -> None:
    """`eval()` would not help here, so the message must not stop at that."""
    message = refuse(mlp(nn.BatchNorm1d(4, track_running_stats=False)).eval(), None, error=pg.PropagaussError)
    assert "body.1" in message and "track_running_stats" in message


# -- posteriors that do not fit


def test_misspelt_parameter() -> None:
    v = torch.ones(4, 3)
    refuse(
        mlp(), r"'body.0.wieght'.*did you mean 'body.0.weight'", pg.DiagonalPosterior({"body.0.wieght": v}),
        error=pg.PosteriorError,
    )  # fmt: skip


def test_unknown_parameter_lists_what_there_is() -> None:
    posterior = pg.DiagonalPosterior({"zzz": torch.ones(1)})
    message = refuse(mlp(), r"'zzz', which is not a parameter", posterior, error=pg.PosteriorError)
    assert "body.0.weight" in message and "did you mean" not in message


@pytest.mark.parametrize(
    "posterior",
    [
        pg.DiagonalPosterior({"body.0.weight": torch.ones(3, 4)}),
        pg.DiagonalPosterior({"body.0.weight": torch.ones(12)}),
        pg.KroneckerPosterior({"body.0.weight": (torch.eye(3), torch.eye(4))}),
        pg.KroneckerPosterior({"body.0.weight": (torch.eye(4),)}),
        pg.KroneckerPosterior({"body.0.bias": (torch.eye(4), torch.eye(2))}),
        pg.FullPosterior(["body.0.weight"], torch.eye(11)),
        pg.FullPosterior(["body.0.weight", "body.0.bias"], torch.eye(12)),
    ],
    ids=["transposed", "flat", "swapped factors", "one factor", "two factors for a bias", "small", "small joint"],
)
def test_wrong_shape(posterior: pg.Posterior) -> None:
    refuse(mlp(), r"body\.0\.(weight|bias)", posterior, error=pg.PosteriorError)


def test_a_single_factor_for_a_whole_weight() -> None:
    """Sizes agree (12 entries), but a layer needs both factors."""
    posterior = pg.KroneckerPosterior({"body.0.weight": (torch.eye(12),)})
    refuse(mlp(), r"body\.0\.weight.*factors|factors.*body\.0\.weight", posterior, error=pg.PosteriorError)


@pytest.mark.parametrize("value, word", [(-1.0, "negative"), (float("nan"), "finite"), (float("inf"), "finite")])
def test_bad_variances(value: float, word: str) -> None:
    bad = torch.ones(4, 3)
    bad[1, 2] = value
    with pytest.raises(pg.PosteriorError, match=rf"'0.weight'.*{word}"):
        pg.DiagonalPosterior({"0.weight": bad})
    with pytest.raises(pg.InputError, match=rf"variance.*{word}"):
        pg.Gaussian(torch.zeros(4, 3), bad)


def test_covariance_that_is_none() -> None:
    indefinite = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    with pytest.raises(pg.PosteriorError, match=r"semi-definite.*-2"):
        pg.FullPosterior(["b"], indefinite)
    with pytest.raises(pg.PosteriorError, match=r"'b'.*semi-definite.*-2"):
        pg.KroneckerPosterior({"b": (indefinite,)})
    with pytest.raises(pg.InputError, match=r"semi-definite.*-2"):
        pg.Gaussian(torch.zeros(1, 2), covariance=indefinite.unsqueeze(0))


@pytest.mark.parametrize(
    "posterior",
    [
        pg.DiagonalPosterior({"body.0.bias": torch.ones(4, dtype=torch.float64)}),
        pg.KroneckerPosterior({"body.0.bias": (torch.eye(4, dtype=torch.float64),)}),
        pg.FullPosterior(["body.0.bias"], torch.eye(4, dtype=torch.float64)),
    ],
    ids=["diagonal", "kronecker", "full"],
)
def test_posterior_of_another_dtype(posterior: pg.Posterior) -> None:
    match = r"'body.0.bias' is torch.float32.*torch.float64.*posterior\.to\(torch\.float32\)"
    refuse(mlp(), match, posterior, error=pg.PosteriorError)


def test_plain_variances_instead_of_a_posterior() -> None:
    model = Recorder(mlp())
    with pytest.raises(pg.PropagaussError, match="DiagonalPosterior"):
        pg.streamline(model, variances(model), X)  # type: ignore[arg-type]
    assert model.real == 0


# -- examples and options


@pytest.mark.parametrize("name, value", [("covariance", "ful"), ("activation", "linearize"), ("attention", None)])
def test_unknown_options(name: str, value: Any) -> None:
    message = refuse(mlp(), rf"{name} is {value!r}", **{name: value})
    allowed = {"covariance": "'full'", "activation": "'linearise'", "attention": "'variance'"}
    assert allowed[name] in message


def test_not_a_module() -> None:
    with pytest.raises(pg.InputError, match=r"nn\.Module.*function"):
        pg.streamline(lambda x: x, None, X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "example",
    [torch.randn(4, 5), (X, X), {"y": X}, X.double(), torch.ones(4, 3, dtype=torch.long), "text"],
    ids=["features", "two inputs", "wrong name", "dtype", "integers", "text"],
)
def test_example_that_does_not_fit(example: Any) -> None:
    model = mlp()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(pg.InputError, match="example"):
        pg.streamline(model, diagonal(model), example)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    "example, word",
    [(X[:0], "empty"), ((), "no tensor"), ({}, "no tensor"), (torch.tensor(1.0), "no tensor"), (None, "no tensor")],
    ids=["empty batch", "no arguments", "no keywords", "scalar", "None"],
)
def test_example_without_samples(example: Any, word: str) -> None:
    refuse(mlp(), word, example=example)


def test_model_that_cannot_be_traced() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else x

    model = Branches()
    with pytest.raises(pg.InputError, match=r"branches on tensor values"):
        pg.streamline(model, diagonal(model), X)


# -- calls


def gaussian(dtype: torch.dtype = torch.float32) -> pg.Gaussian:
    return pg.Gaussian(X.to(dtype), torch.ones(4, 3, dtype=dtype))


def test_gaussian_for_a_plain_net() -> None:
    model = mlp()
    net = pg.streamline(model, diagonal(model), X)
    with pytest.raises(pg.InputError, match=r"plain tensor.*is a Gaussian.*streamline again with a Gaussian"):
        net(gaussian())


def test_plain_tensor_for_a_net_of_gaussians() -> None:
    model = mlp()
    net = pg.streamline(model, diagonal(model), gaussian())
    with pytest.raises(pg.InputError, match=r"was a Gaussian.*is a Tensor.*pg\.Gaussian\(x, variance="):
        net(X)


@pytest.mark.parametrize("uncertain", [False, True], ids=["plain", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.long], ids=str)
def test_input_of_another_dtype(dtype: torch.dtype, uncertain: bool) -> None:
    if uncertain and not dtype.is_floating_point:
        pytest.skip("there is no Gaussian of integers")
    model = mlp()
    net = pg.streamline(model, diagonal(model), gaussian() if uncertain else X)
    with pytest.raises(pg.InputError, match=rf"{dtype}.*torch.float32.*\.to\(\)"):
        net(gaussian(dtype) if uncertain else X.to(dtype))


def test_mean_and_variance_of_different_dtypes() -> None:
    with pytest.raises(pg.InputError, match=r"mean is torch.float32.*variance is torch.float64.*\.to\(\)"):
        pg.Gaussian(X, torch.ones(4, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "args, kwargs", [((), {}), ((X, X), {}), ((), {"input": X}), (([X],), {"y": X}), ((None,), {}), (("text",), {})]
)
def test_call_of_another_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model = mlp()
    net = pg.streamline(model, diagonal(model), X)
    with pytest.raises(pg.InputError):
        net(*args, **kwargs)


def test_batch_that_the_model_fixed() -> None:
    model = Call(lambda x: x.reshape(4, 3) + torch.ones(4, 1))
    net = pg.streamline(model, diagonal(model), X)
    with pytest.raises(pg.InputError, match=r"takes \[4, 3\]"):
        net(X[:3])
    net(X)


# -- inputs that are not finite, or whose squares are not


def predictors(net: Any) -> dict[str, Callable[[Tensor], Any]]:
    classifier, regressor = pg.Classifier(net), pg.Regressor(net, noise=0.1)
    labels, targets = torch.zeros(4, dtype=torch.long), torch.zeros(4, 2)
    return {
        "classifier": classifier,
        "log_probs": classifier.log_probs,
        "mean_field": pg.Classifier(net, link="mean_field"),
        "regressor": regressor,
        "decompose": regressor.decompose,
        "joint": regressor.joint,
        "class scale": lambda x: classifier.fit_scale([(x, labels)], progress=False),
        "regression scale": lambda x: regressor.fit_scale([(x, targets)], progress=False),
    }


PREDICTORS = list(predictors(lambda x: x))


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("name", PREDICTORS)
def test_huge_inputs_are_never_a_class(name: str, covariance: str) -> None:
    """1e25 is finite in single precision, and so is what the model makes of it; the squares are not."""
    model = mlp()
    predict = predictors(pg.streamline(model, diagonal(model), X, covariance=covariance))[name]
    x = X.clone()
    x[1, 2] = -1e25
    assert model(x).isfinite().all()
    with pytest.raises(pg.InputError, match=r"variances of 1 of 4 samples.*1e\+25.*rescale.*double precision"):
        predict(x)
    predict(X)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", PREDICTORS)
def test_inputs_that_are_not_finite(name: str, value: float) -> None:
    model = mlp()
    x = X.clone()
    x[2:, 0] = value
    with pytest.raises(pg.InputError, match=r"s of 2 .*of 4 samples.*input itself has 2 values"):
        predictors(pg.streamline(model, diagonal(model), X))[name](x)


def test_posterior_so_wide_that_variances_overflow() -> None:
    model = mlp()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e30) for n, p in model.named_parameters()})
    with pytest.raises(pg.InputError, match=r"variances of 4 of 4.*prior precision"):
        pg.Classifier(pg.streamline(model, posterior, X))(X)


def test_values_are_not_read_while_compiling() -> None:
    model = mlp()
    classifier = pg.Classifier(pg.streamline(model, diagonal(model), X))
    torch._dynamo.reset()
    compiled = torch.compile(classifier.log_probs, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), classifier.log_probs(X))
    one = torch.vmap(lambda x: classifier.log_probs(x[None])[0])(X)
    torch.testing.assert_close(one, classifier.log_probs(X))


# -- errors in general


def test_errors_are_value_errors() -> None:
    """So that code which knows nothing of propagauss can catch them."""
    for error in (pg.InputError, pg.PosteriorError, pg.UnsupportedOpError):
        assert issubclass(error, pg.PropagaussError) and issubclass(error, ValueError)


def test_functional_dropout_is_seen_too() -> None:
    refuse(Call(lambda x: F.dropout(x, 0.5, training=True)), "training mode")


class Numbers(nn.Module):
    """Multiplies by a number that was read from an uncertain tensor."""

    def __init__(self, read: Callable[[nn.Linear, Tensor], float]):
        super().__init__()
        self.layer, self.read = nn.Linear(3, 2), read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self.layer, x)


READS = {"value": lambda layer, x: layer(x).sum().item(), "parameter": lambda layer, x: layer.weight.norm().item()}


@pytest.mark.parametrize("make", [pg.streamline, pg.linearise])
@pytest.mark.parametrize("name", READS)
def test_a_number_read_from_an_uncertain_tensor_is_refused(name: str, make: Callable[..., Any]) -> None:
    model = Numbers(READS[name]).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.01) for n, p in model.named_parameters()})
    with pytest.raises(pg.PropagaussError, match=r"plain number|depends on the others"):
        make(model, posterior, torch.randn(2, 3))
