"""A regressor without a noise takes that of the posterior behind its net, or says that there is none."""

import math
import warnings

import pytest
import torch
from torch import nn

import propagauss as pg
from propagauss.baselines import GLM, MAP, MonteCarlo

torch.set_num_threads(1)
UNKNOWN = "the noise of the observations is not known"


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    x = torch.randn(60, 3)
    y = x[:, :2] + 0.3 * torch.randn(60, 2)
    model = nn.Linear(3, 2).eval()
    with torch.no_grad():
        model.weight.copy_(torch.eye(3)[:2])
        model.bias.zero_()
    return model, pg.fit_laplace(model, [(x, y)], "regression"), x, y


def test_every_kind_of_net_knows_it(fitted, tmp_path):
    model, posterior, x, _ = fitted
    noise = posterior.details["noise"]
    assert noise == pytest.approx(0.3, rel=0.2)
    posterior.save(tmp_path / "p.safetensors")
    for each in (
        posterior,
        posterior.select("weight"),
        posterior.scale(0.5),
        pg.load_posterior(tmp_path / "p.safetensors"),
    ):
        nets = [pg.streamline(model, each, x[:2]), pg.linearise(model, each, x[:2]), GLM(model, each)]
        nets += [MonteCarlo(model, each, 10), pg.streamline(model, each, x, variance_tolerance=0.1)]
        for net in nets:
            regressor = pg.Regressor(net)
            assert regressor.noise == pytest.approx(noise)
            variance = net(x).variance + noise**2
            torch.testing.assert_close(regressor(x).variance, variance)


def test_a_given_noise_wins_and_zero_is_one(fitted):
    model, posterior, x, _ = fitted
    net = pg.streamline(model, posterior, x[:2])
    assert pg.Regressor(net, noise=2.0).noise == 2.0
    torch.testing.assert_close(pg.Regressor(net, noise=0.0)(x).variance, net(x).variance)
    assert pg.Regressor(net, noise=[1.0, 2.0]).decompose(x).aleatoric[0].tolist() == [1.0, 4.0]


def test_without_any_nothing_is_predicted(fitted, tmp_path):
    model, posterior, x, y = fitted
    bare = pg.DiagonalPosterior({n: posterior.variance(n) for n in posterior.names})
    regressor = pg.Regressor(pg.streamline(model, bare, x[:2]))
    assert math.isnan(regressor.noise) and "noise=unknown" in repr(regressor)
    assert regressor.latent(x).mean.shape == (60, 2)
    for use in (
        lambda: regressor(x),
        lambda: regressor.decompose(x),
        lambda: regressor.joint(x),
        lambda: regressor.likelihood.summary(regressor.latent(x)),
        lambda: regressor.fit_scale([(x, y)], progress=False),
        lambda: regressor.export(tmp_path / "r.pt2"),
        lambda: pg.Regressor(MAP(model))(x),
    ):
        with pytest.raises(pg.InputError, match=UNKNOWN):
            use()
    regressor.fit_scale([(x, y)], fit_noise=True, progress=False)
    assert regressor.noise.shape == (2,) and regressor(x).variance.isfinite().all()


def test_a_known_noise_is_exported(fitted, tmp_path):
    model, posterior, x, _ = fitted
    regressor = pg.Regressor(pg.linearise(model, posterior, x[:2], covariance="diagonal"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.export.load(regressor.export(tmp_path / "r.pt2")).module()(x)
    torch.testing.assert_close(found["variance"], regressor(x).variance)
