"""The fitted scale and noise against dense grids and known truths; what loaders may yield."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from propagauss import Gaussian, InputError
from propagauss.baselines import MAP
from propagauss.links import LINKS
from propagauss.metrics import nlpd
from propagauss.predictive.classifier import Classifier
from propagauss.predictive.regressor import Regressor

torch.set_num_threads(1)
F64 = torch.float64
links = pytest.mark.parametrize("link", LINKS)


class Latent(nn.Module):
    """The input is the latent itself: mean in the first half of the columns, log-variance in the second."""

    def __init__(self, full: bool = False):
        super().__init__()
        self.full = full

    def forward(self, x: Tensor) -> Gaussian:
        mean, log_variance = x.chunk(2, -1)
        variance = log_variance.exp()
        if self.full:
            correlation = torch.full((mean.shape[-1],) * 2, 0.3, dtype=x.dtype).fill_diagonal_(1.0)
            root = variance.sqrt()
            return Gaussian.full(mean, correlation * root.unsqueeze(-1) * root.unsqueeze(-2))
        return Gaussian.diagonal(mean, variance)


def classification(n: int = 400, classes: int = 4, true_scale: float = 6.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Labels drawn from logits whose variance is `true_scale` times the one that the net reports."""
    g = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(n, classes, generator=g, dtype=F64)
    log_variance = torch.randn(n, classes, generator=g, dtype=F64)
    logits = mean + (true_scale * log_variance.exp()).sqrt() * torch.randn(n, classes, generator=g, dtype=F64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    return torch.cat([mean, log_variance], 1), y


def regression(n: int = 4000, outputs: int = 1, scale: float = 3.0, noise=0.5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(n, outputs, generator=g, dtype=F64)
    log_variance = 2 * torch.randn(n, outputs, generator=g, dtype=F64)
    total = scale * log_variance.exp() + torch.as_tensor(noise, dtype=F64).square()
    return torch.cat([mean, log_variance], 1), mean + total.sqrt() * torch.randn(n, outputs, generator=g, dtype=F64)


def loader(x: Tensor, y: Tensor, batch: int = 128) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch)


# -- classification


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
@links
def test_scale_against_a_grid(link, full):
    x, y = classification()
    clf = Classifier(Latent(full), link=link, samples=128)
    before = nlpd(clf(x), y)
    assert clf.fit_scale(loader(x, y)) is clf
    report = clf.fit_report
    assert report is not None and report.points == len(y)
    assert report.nlpd_before == pytest.approx(before) and report.nlpd_after == pytest.approx(nlpd(clf(x), y))
    assert report.nlpd_after <= report.nlpd_before

    fitted, values = clf.scale, []
    for scale in np.logspace(-3, 3, 121):
        clf.scale = float(scale)
        values.append(nlpd(clf(x), y))
    assert report.nlpd_after <= min(values) + 1e-9
    if max(values) - min(values) > 1e-3:
        nearest = float(np.logspace(-3, 3, 121)[int(np.argmin(values))])
        assert fitted == pytest.approx(nearest, rel=0.13)  # one step of the grid


def test_scale_recovers_the_truth():
    x, y = classification(n=5000)
    clf = Classifier(Latent(), link="monte_carlo", samples=64).fit_scale(loader(x, y, 1000))
    assert clf.scale == pytest.approx(6.0, rel=0.2)


def test_fitting_twice_changes_nothing_and_ignores_the_start():
    x, y = classification()
    clf = Classifier(Latent()).fit_scale(loader(x, y))
    first = clf.scale
    assert clf.fit_scale(loader(x, y)).scale == pytest.approx(first, rel=1e-5)
    assert Classifier(Latent(), scale=1e-4).fit_scale(loader(x, y)).scale == pytest.approx(first, rel=1e-5)


def test_batches_do_not_matter():
    x, y = classification()
    whole = Classifier(Latent()).fit_scale([(x, y)])
    parts = Classifier(Latent()).fit_scale(loader(x, y, 7))
    assert parts.scale == pytest.approx(whole.scale, rel=1e-4)


def test_single_precision():
    x, y = classification()
    reference = Classifier(Latent()).fit_scale([(x, y)]).scale
    assert Classifier(Latent()).fit_scale([(x.float(), y)]).scale == pytest.approx(reference, rel=1e-3)


def test_labels_with_a_trailing_dimension_are_not_broadcast():
    x, y = classification()
    flat = Classifier(Latent()).fit_scale([(x, y)])
    column = Classifier(Latent()).fit_scale([(x, y[:, None])])
    assert column.scale == flat.scale and column.fit_report == flat.fit_report


def test_no_variance_leaves_the_scale():
    model = nn.Linear(3, 4)
    clf = Classifier(MAP(model)).fit_scale([(torch.randn(10, 3), torch.randint(4, (10,)))])
    assert clf.scale == 1.0


def test_at_the_end_of_the_range():
    """All labels are the arg max of a confident mean: any variance hurts."""
    x, _ = classification()
    clf = Classifier(Latent()).fit_scale([(x, x[:, :4].argmax(1))])
    assert clf.scale == pytest.approx(1e-6, rel=1e-2)
    assert clf.fit_report is not None and clf.fit_report.at_bound and "end of the range" in str(clf.fit_report)


def test_report_is_shown():
    x, y = classification()
    clf = Classifier(Latent()).fit_scale([(x, y)])
    assert str(clf.fit_report) in repr(clf) and "NLPD" in repr(clf) and "400 points" in repr(clf)


def test_per_token_labels():
    x, y = classification()
    tokens = Classifier(Latent()).fit_scale([(x.reshape(100, 4, 8), y.reshape(100, 4))])
    assert tokens.scale == pytest.approx(Classifier(Latent()).fit_scale([(x, y)]).scale)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_inputs_of_several_parts(kind):
    def net(mean, log_variance):
        return Latent()(torch.cat([mean, log_variance], 1))

    x, y = classification()
    a, b = x.chunk(2, 1)
    inputs = {"tuple": (a, b), "list": [a, b], "dict": {"mean": a, "log_variance": b}}[kind]
    expected = Classifier(Latent()).fit_scale([(x, y)]).scale
    assert Classifier(net).fit_scale([(inputs, y)]).scale == pytest.approx(expected)


def test_leaves_gradients_and_the_net_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=F64))

        def forward(self, x):
            assert not torch.is_grad_enabled()
            return Latent()(x * self.weight)

    net, (x, y) = Net(), classification()
    Classifier(net).fit_scale([(x, y)])
    assert torch.is_grad_enabled() and net.weight.grad is None and net.training


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "empty"),
        ([(torch.zeros(0, 8), torch.zeros(0, dtype=torch.long))], "empty"),
        ([torch.zeros(3, 8)], "pairs"),
        ([(torch.zeros(3, 8), torch.zeros(3), torch.zeros(3))], "pairs"),
        ([{"x": torch.zeros(3, 8)}], "without 'labels'"),
        ([(torch.zeros(3, 8), torch.tensor([0, 1, 4]))], "0 to 3"),
        ([(torch.zeros(3, 8), torch.tensor([0, -1, 2]))], "0 to 3"),
        ([(torch.zeros(3, 8), torch.zeros(3))], "integers"),
        ([(torch.zeros(3, 8), torch.zeros(3, dtype=torch.bool))], "integers"),
        ([(torch.zeros(3, 8), torch.zeros(3, 4, dtype=torch.long))], "labels have shape"),
        ([(torch.zeros(3, 8), torch.zeros(2, dtype=torch.long))], "labels have shape"),
        ([(torch.full((3, 8), math.nan), torch.zeros(3, dtype=torch.long))], "not finite"),
    ],
)
def test_bad_classification_data(batches, message):
    with pytest.raises(InputError, match=message):
        Classifier(Latent()).fit_scale(batches)


def test_variances_that_overflowed():
    def wide(x):
        return Gaussian.diagonal(x, torch.full_like(x, math.inf))

    with pytest.raises(InputError, match="larger prior precision"):
        Classifier(wide).fit_scale([(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))])


def test_a_used_up_generator_is_empty():
    x, y = classification()
    generator = (batch for batch in [(x, y)])
    clf = Classifier(Latent()).fit_scale(generator)
    with pytest.raises(InputError, match="only once"):
        clf.fit_scale(generator)


# -- regression


def test_regression_scale_against_a_grid():
    x, y = regression(n=500)
    reg = Regressor(Latent(), noise=0.5)
    before = nlpd(reg(x), y)
    reg.fit_scale(loader(x, y))
    assert reg.fit_report is not None
    assert reg.fit_report.nlpd_before == pytest.approx(before)
    assert reg.fit_report.nlpd_after == pytest.approx(nlpd(reg(x), y))
    assert reg.noise == 0.5
    values = {}
    for scale in np.logspace(-2, 3, 101):
        values[float(scale)] = nlpd(Regressor(Latent(), noise=0.5, scale=float(scale))(x), y)
    assert reg.fit_report.nlpd_after <= min(values.values()) + 1e-9
    assert reg.scale == pytest.approx(min(values, key=lambda s: values[s]), rel=0.13)


def test_scale_and_noise_recover_the_truth():
    x, y = regression()
    reg = Regressor(Latent(), noise=3.0).fit_scale(loader(x, y), fit_noise=True)
    assert reg.scale == pytest.approx(3.0, rel=0.15) and reg.noise == pytest.approx(0.5, rel=0.15)
    assert reg.fit_report is not None and reg.fit_report.nlpd_after < reg.fit_report.nlpd_before
    assert reg.fit_report.nlpd_after == pytest.approx(nlpd(reg(x), y))


def test_scale_and_noise_against_a_grid():
    x, y = regression(n=300)
    reg = Regressor(Latent(), noise=1.0).fit_scale([(x, y)], fit_noise=True)
    assert reg.fit_report is not None
    for scale in np.logspace(-2, 3, 31):
        for noise in np.logspace(-3, 1, 31):
            other = nlpd(Regressor(Latent(), noise=float(noise), scale=float(scale))(x), y)
            assert reg.fit_report.nlpd_after <= other + 1e-7


def test_noise_per_output():
    x, y = regression(outputs=3, noise=[0.1, 1.0, 10.0])
    reg = Regressor(Latent()).fit_scale(loader(x, y), fit_noise=True)  # none given: one per output
    assert isinstance(reg.noise, Tensor)
    torch.testing.assert_close(reg.noise, torch.tensor([0.1, 1.0, 10.0], dtype=F64), rtol=0.2, atol=0)
    assert reg.scale == pytest.approx(3.0, rel=0.15)
    shared = Regressor(Latent(), noise=1.0).fit_scale(loader(x, y), fit_noise=True)
    assert isinstance(shared.noise, float)
    assert nlpd(reg(x), y) < nlpd(shared(x), y)
    assert "noise" in str(reg.fit_report)


def test_fitted_noise_is_kept_by_a_later_fit_of_the_scale():
    x, y = regression(outputs=2)
    reg = Regressor(Latent()).fit_scale([(x, y)], fit_noise=True)
    scale, noise = reg.scale, reg.noise
    assert isinstance(noise, Tensor) and torch.equal(noise, reg.fit_scale([(x, y)]).noise)
    assert reg.scale == pytest.approx(scale, rel=1e-2)


def test_noise_without_variance_is_the_error_of_the_model():
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(200, 3, dtype=F64), torch.randn(200, 1, dtype=F64)
    reg = Regressor(MAP(model)).fit_scale([(x, y)], fit_noise=True)
    assert reg.scale == 1.0
    assert reg.noise == pytest.approx((model(x) - y).square().mean().sqrt().item(), rel=1e-4)


def test_a_point_hit_exactly_keeps_the_noise_positive():
    x = torch.zeros(4, 2, dtype=F64)
    reg = Regressor(MAP(nn.Identity()), noise=1.0).fit_scale([(x, x)], fit_noise=True)
    assert isinstance(reg.noise, float) and 0 < reg.noise < 1e-10


def test_targets_without_the_output_dimension():
    x, y = regression(n=300)
    flat = Regressor(Latent(), noise=0.5).fit_scale([(x, y[:, 0])])
    assert flat.scale == Regressor(Latent(), noise=0.5).fit_scale([(x, y)]).scale


@pytest.mark.parametrize(
    ("batches", "noise", "message"),
    [
        ([], 1.0, "empty"),
        ([(torch.zeros(3, 4), torch.zeros(3, 1))], 1.0, "targets have shape"),
        ([(torch.zeros(3, 4), torch.zeros(3))], 1.0, "targets have shape"),
        ([(torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.bool))], 1.0, "real numbers"),
        ([(torch.zeros(3, 4), torch.full((3, 2), math.nan))], 1.0, "not finite"),
        ([(torch.zeros(3, 4), torch.zeros(3, 2))], torch.ones(3), "3 noise levels"),
        ([(torch.full((3, 4), -math.inf).nan_to_num(neginf=-200.0), torch.zeros(3, 2))], 0.0, "variance is zero"),
    ],
)
def test_bad_regression_data(batches, noise, message):
    with pytest.raises(InputError, match=message):
        Regressor(Latent(), noise=noise).fit_scale(batches)
