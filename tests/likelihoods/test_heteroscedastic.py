"""Noise that the network gives: moments against a million draws, shapes, calibration of the noise, errors."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import propagauss as pg
from propagauss.likelihoods import HeteroscedasticLikelihood
from propagauss.metrics import nlpd
from propagauss.predictive.calibration import fit_scale

torch.set_num_threads(1)
F64 = torch.float64


def latent(batch: int = 5) -> pg.Gaussian:
    torch.manual_seed(0)
    root = torch.randn(batch, 2, 2, dtype=F64)
    return pg.Gaussian(torch.randn(batch, 2, dtype=F64), covariance=root @ root.mT / 4)


def test_moments_against_a_million_draws():
    """Mean and log variance may be correlated: it does not matter."""
    g = latent()
    generator = torch.Generator().manual_seed(1)
    f = g.sample((1_000_000,), generator)
    y = f[..., :1] + (f[..., 1:] / 2).exp() * torch.randn(f.shape[:-1], generator=generator, dtype=F64).unsqueeze(-1)
    found = HeteroscedasticLikelihood().predictive(g)
    assert isinstance(found, Normal) and found.mean.shape == (5, 1)
    assert ((found.mean - y.mean(0)).abs() < 5 * y.std(0) / 1e3).all()
    squares = (y - found.mean).square()
    assert ((found.variance - squares.mean(0)).abs() < 5 * squares.std(0) / 1e3).all()


def test_parts():
    g = latent()
    parts = HeteroscedasticLikelihood(3.0).decompose(g)
    torch.testing.assert_close(parts.epistemic, g.variance[:, :1])
    torch.testing.assert_close(parts.aleatoric, 3 * (g.mean[:, 1:] + g.variance[:, 1:] / 2).exp())


@pytest.mark.parametrize("shape", [(6, 1), (6,), (6, 4, 1), (6, 4)])
def test_targets_of_every_shape(shape):
    positions = shape[1:] if shape[1:] != (1,) else ()
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double().eval()
    x, y = torch.randn(6, *(p for p in positions if p != 1), 3, dtype=F64), torch.randn(shape, dtype=F64)
    posterior = pg.fit_laplace(model, [(x, y)], "heteroscedastic", "full", prior_precision=1.0)
    rows = torch.cat([x.reshape(-1, 3), torch.ones(x.numel() // 3, 1, dtype=F64)], 1)
    with torch.no_grad():
        weights = torch.stack([(-model(x)[..., 1]).exp().flatten(), torch.full((len(rows),), 0.5, dtype=F64)], 1)
    for output in range(2):  # the Fisher matrix is diagonal, so that the two are apart
        expected = torch.linalg.inv(rows.mT @ (weights[:, output, None] * rows) + torch.eye(4, dtype=F64))
        index = torch.tensor([3 * output, 3 * output + 1, 3 * output + 2, 6 + output])
        torch.testing.assert_close(posterior.to_dense()[index][:, index], expected)
    regressor = pg.HeteroscedasticRegressor(pg.streamline(model, posterior, x[:2]))
    assert regressor(x).mean.shape == (*x.shape[:-1], 1)
    regressor.fit_scale([(x, y)], progress=False)
    assert regressor.fit_report is not None
    assert regressor.fit_report.nlpd_after == pytest.approx(nlpd(regressor(x), y.reshape(*x.shape[:-1], 1)))


def test_far_from_the_data_it_is_the_weights_that_are_unknown():
    torch.manual_seed(0)
    x = 2 * torch.rand(200, 1) - 1
    y = x + (0.05 + 0.4 * (x > 0)) * torch.randn(200, 1)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
    likelihood, optimiser = HeteroscedasticLikelihood(), torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        (likelihood.loss(model(x), y) / len(x)).backward()
        optimiser.step()
    posterior = pg.fit_laplace(model.eval(), [(x, y)], "heteroscedastic", "kronecker")
    regressor = pg.HeteroscedasticRegressor(pg.linearise(model, posterior, x[:2]))
    parts = regressor.decompose(torch.tensor([[-0.5], [0.5], [4.0]]))
    quiet, loud, far = range(3)
    assert parts.aleatoric[loud] > 10 * parts.aleatoric[quiet]
    assert parts.epistemic[far] > 10 * parts.epistemic[loud]
    torch.testing.assert_close(parts.total, regressor(torch.tensor([[-0.5], [0.5], [4.0]])).variance)


def test_the_factor_of_the_noise_is_found():
    torch.manual_seed(0)
    x = torch.randn(5000, 2, dtype=F64)
    y = x[:, :1] + math.sqrt(4.0) * (x[:, 1:] / 2).exp() * torch.randn(5000, 1, dtype=F64)

    def net(x: Tensor) -> pg.Gaussian:
        return pg.Gaussian(x, torch.full_like(x, 1e-3))

    report, fitted = fit_scale(
        net, [(x[:3000], y[:3000]), (x[3000:], y[3000:])], HeteroscedasticLikelihood(), 1.0, True
    )
    assert float(fitted.noise_factor) == pytest.approx(4.0, rel=0.1)
    assert report.nlpd_after < report.nlpd_before


def test_the_factor_is_saved_with_the_module():
    def net(x: Tensor) -> pg.Gaussian:
        return pg.Gaussian(x, torch.ones_like(x))

    first, second = pg.HeteroscedasticRegressor(net, noise_factor=2.5), pg.HeteroscedasticRegressor(net)
    second.load_state_dict(first.state_dict())
    assert second.noise_factor == 2.5 and "noise_factor=2.5" in repr(second)
    x = torch.randn(4, 2)
    torch.testing.assert_close(second.decompose(x).aleatoric, 2.5 * (x[:, 1:] + 0.5).exp())


def test_errors_say_what_to_do():
    x = torch.randn(4, 3)
    with pytest.raises(pg.InputError, match=r"batch 0: .*needs outputs \[\.\.\., 2\].*stack"):
        pg.fit_laplace(nn.Linear(3, 3).eval(), [(x, torch.zeros(4, 1))], "heteroscedastic")
    with pytest.raises(pg.InputError, match="targets have shape"):
        pg.fit_laplace(nn.Linear(3, 2).eval(), [(x, torch.zeros(4, 2))], "heteroscedastic")
    with pytest.raises(pg.InputError, match="needs outputs"):
        pg.HeteroscedasticRegressor(lambda x: pg.Gaussian(x, torch.ones_like(x)))(x)
    with pytest.raises(pg.InputError, match=r"not finite.*prior precision"):
        pg.HeteroscedasticRegressor(lambda x: pg.Gaussian(x[:, :2], torch.full((4, 2), 1e4)))(x)
    with pytest.raises(pg.InputError, match="noise_factor"):
        HeteroscedasticLikelihood(-1.0)


# -- models that return mean and log variance apart


class Output(NamedTuple):
    mu: Tensor
    logvar: Tensor


@functools.cache
def hugging_face() -> Callable[..., object]:
    """A class of outputs as models of `transformers` have them."""
    output = pytest.importorskip("transformers.utils").ModelOutput
    fields = [("mean", Tensor | None, None), ("log_variance", Tensor | None, None)]
    return dataclasses.make_dataclass("HuggingFaceOutput", fields, bases=(output,))


FORMS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "stacked": lambda m, s: torch.stack([m, s], -1),
    "tuple": lambda m, s: (m, s),
    "dict": lambda m, s: {"log_variance": s, "mean": m},
    "named": Output,
    "hugging face": lambda m, s: hugging_face()(mean=m, log_variance=s),
}


class Heads(nn.Module):
    def __init__(self, form: str, width: int | None):
        super().__init__()
        self.body, self.form, self.width = nn.Linear(3, 4), form, width
        self.mean, self.log_variance = nn.Linear(4, width or 1), nn.Linear(4, width or 1)

    def forward(self, x: Tensor) -> object:
        h = self.body(x).tanh()
        m, s = self.mean(h), self.log_variance(h)
        return FORMS[self.form](*((m, s) if self.width else (m.squeeze(-1), s.squeeze(-1))))


def heads(form: str, width: int | None) -> nn.Module:
    torch.manual_seed(0)
    return Heads(form, width).double().eval()


def held_out(width: int | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 3, dtype=F64), torch.randn(*([12, width] if width else [12]), dtype=F64)


@functools.cache
def fitted(form: str, width: int | None) -> tuple[nn.Module, pg.Posterior]:
    model = heads(form, width)
    return model, pg.fit_laplace(model, [held_out(width)], "heteroscedastic", "kronecker", prior_precision=1.0)


@functools.cache
def calibrated(form: str, width: int | None, engine: Callable[..., Any]) -> pg.HeteroscedasticRegressor:
    (model, posterior), (x, y) = fitted(form, width), held_out(width)
    return pg.HeteroscedasticRegressor(engine(model, posterior, x[:2])).calibrate([(x, y)], progress=False)


@pytest.mark.parametrize(
    ("form", "width"), [("tuple", None), ("tuple", 3), ("dict", 1), ("named", 3), ("hugging face", 1)]
)
@pytest.mark.parametrize("engine", [pg.streamline, pg.linearise])
@pytest.mark.usefixtures("one_trace")
def test_mean_and_log_variance_apart(form, width, engine, tmp_path):
    """All is as with a model that returns both in one tensor."""
    x, _ = held_out(width)
    found = calibrated(form, width, engine)
    one, apart = (each(x) for each in (calibrated("stacked", width, engine), found))
    shape = (12, width, 1) if width == 3 else (12, 1)
    torch.testing.assert_close(apart.mean, one.mean.reshape(shape))
    torch.testing.assert_close(apart.variance, one.variance.reshape(shape))
    loaded = pg.load(found.save(tmp_path / "apart.pt2"))
    torch.testing.assert_close(loaded(x).variance, apart.variance)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"mean": torch.zeros(4), "variance": torch.ones(4)}, "the fields mean, variance"),
        ((torch.zeros(4, 1), torch.zeros(1)), r"\(4, 1\) and a log variance \(1,\)"),
    ],
)
def test_outputs_that_are_not_a_pair(output, message):
    with pytest.raises(pg.InputError, match=message):
        HeteroscedasticLikelihood().joined(output)
