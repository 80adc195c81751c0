"""`calibrate`: the rule by which it chooses, what it can never do worse than, and what it says."""

import functools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad

from predictive.calibration.test_scale import Latent, classification, loader, regression
from propagauss import Gaussian, InputError, fit_laplace, streamline
from propagauss.baselines import MAP, TemperatureScaling
from propagauss.likelihoods import BernoulliLikelihood, CategoricalLikelihood, PoissonLikelihood
from propagauss.likelihoods.base import Held
from propagauss.likelihoods.temperature import TEMPERATURES, Tempered, gaps, minimise_convex
from propagauss.metrics import nlpd
from propagauss.predictive.binary import BinaryClassifier
from propagauss.predictive.calibration import LOWEST, Calibration, minimise, paired
from propagauss.predictive.classifier import Classifier
from propagauss.predictive.predictor import Predictor
from propagauss.predictive.regressor import Regressor

torch.set_num_threads(1)
F64 = torch.float64
links = pytest.mark.parametrize("link", ["probit", "mean_field", "monte_carlo"])


def quiet(predictor: Predictor, data, tolerance: float = 1.0) -> Calibration:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = predictor.calibrate(data, tolerance, progress=False).fit_report
    assert isinstance(report, Calibration)
    return report


def overconfident(n: int = 500, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Labels of a model whose logits are twice too large, and variances that say nothing about where it errs."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 3, generator=g, dtype=F64)
    y = torch.multinomial((logits / 2).softmax(-1), 1, generator=g).squeeze(1)
    return torch.cat([logits, torch.randn(n, 3, generator=g, dtype=F64)], 1), y


# -- what it can never do worse


@links
@pytest.mark.parametrize("data", [classification, overconfident], ids=["too narrow", "overconfident"])
def test_never_worse_than_temperature_scaling(link, data):
    x, y = data()
    plain = TemperatureScaling(Means()).fit([(x, y)], progress=False).fit_report
    assert plain is not None
    clf = Classifier(Latent(), link=link, samples=64)
    report = quiet(clf, loader(x, y), tolerance=0.0)
    assert report.nlpd_after <= plain.nlpd_after + 1e-5
    assert report.nlpd_plain == pytest.approx(plain.nlpd_after, abs=1e-6)
    assert report.nlpd_after == pytest.approx(nlpd(clf(x), y), abs=1e-6)
    assert report.nlpd_after <= report.nlpd_before + 1e-6

    for tolerance in (0.5, 1.0, 2.0):
        allowed = quiet(clf, loader(x, y), tolerance)
        losses = -clf(x).log_prob(y)
        best = Classifier(Latent(), link=link, samples=64, scale=allowed.best)
        best.temperature = _temperature_of(best, x, y)
        difference, error = paired(losses, -best(x).log_prob(y))
        assert difference <= tolerance * error + 1e-5


class Means(nn.Module):
    """The logits that `Latent` has as its mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[0]


def _temperature_of(clf: Classifier, x: Tensor, y: Tensor) -> float:
    """By a dense grid, within the range that `calibrate` allows beside a variance."""
    log_probs = clf.log_probs(x)
    grid = torch.logspace(math.log10(0.5), 1, 801, dtype=F64)
    tempered = (log_probs / grid[:, None, None]).log_softmax(-1)
    return float(grid[tempered[:, torch.arange(len(y)), y].mean(1).argmax()])


# -- the rule


@functools.cache
def losses_by_scale() -> dict[float, Tensor]:
    """Of the labels of `overconfident`, for all scales of a dense grid, each with its temperature from a grid."""
    x, y = overconfident()

    def losses(scale: float) -> Tensor:
        clf = Classifier(Latent(), link="probit", scale=scale)
        clf.temperature = _temperature_of(clf, x, y)
        return -clf(x).log_prob(y)

    return {float(s): losses(float(s)) for s in np.logspace(-3, 0, 31)}


@pytest.mark.parametrize("tolerance", [0.5, 1.0, 2.0])
def test_the_largest_scale_that_the_data_allow(tolerance):
    x, y = overconfident()
    report = quiet(Classifier(Latent(), link="probit"), [(x, y)], tolerance)
    best = min(losses_by_scale().values(), key=lambda each: each.mean())
    good = [s for s, each in losses_by_scale().items() if paired(each, best)[0] <= tolerance * paired(each, best)[1]]
    assert report.after == pytest.approx(max(good), rel=0.2)


def test_more_tolerance_keeps_more():
    x, y = overconfident()
    scales = [quiet(Classifier(Latent()), [(x, y)], t).after for t in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert scales == sorted(scales) and scales[0] < scales[-1] <= 1.0


def test_a_scale_above_one_only_where_the_data_ask_for_it():
    x, y = classification(n=3000, true_scale=30.0)
    assert quiet(Classifier(Latent(), "monte_carlo", samples=64), [(x, y)]).after > 3
    x, y = overconfident()  # the best is below 1, and there is tolerance for scales far above it
    assert quiet(Classifier(Latent()), [(x, y)], tolerance=50.0).after == 1.0


def test_keeps_the_variance_where_fit_scale_ends_at_the_bound():
    """An underconfident model: any variance softens more, which a temperature can take back."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 3, generator=g, dtype=F64)
    y = torch.multinomial((1.6 * logits).softmax(-1), 1, generator=g).squeeze(1)
    x = torch.cat([logits, torch.full_like(logits, -1.0)], 1)  # the same variance everywhere
    alone = Classifier(Latent()).fit_scale([(x, y)], progress=False)
    assert alone.fit_report is not None and alone.fit_report.at_bound
    clf = Classifier(Latent())
    report = quiet(clf, [(x, y)])
    assert clf.scale == 1.0 and clf.temperature < 0.9
    assert report.nlpd_after < alone.fit_report.nlpd_after


def test_the_start_does_not_matter():
    x, y = classification()
    first, second = Classifier(Latent()), Classifier(Latent(), scale=1e-4, temperature=3.0)
    quiet(first, loader(x, y)), quiet(second, [(x, y)])
    assert second.scale == pytest.approx(first.scale, rel=0.01)
    assert second.temperature == pytest.approx(first.temperature, rel=1e-3)


def test_no_variance_leaves_the_scale_and_fits_the_temperature():
    x, y = overconfident()
    clf = Classifier(MAP(Means()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf.calibrate([(x, y)], progress=False)
    assert clf.scale == 1.0
    assert clf.temperature == pytest.approx(TemperatureScaling(Means()).fit([(x, y)]).temperature, rel=1e-3)


@pytest.mark.parametrize("likelihood", [CategoricalLikelihood(), BernoulliLikelihood()], ids=lambda each: each.name)
def test_the_temperature_is_found_by_derivatives_of_the_losses(likelihood):
    """Against automatic derivatives of the log densities that predictions have, and a search that knows none."""
    x, labels = overconfident(60)
    latent, y = Latent()(x), nn.functional.one_hot(labels, 3)
    if likelihood.name == "classification":
        y = labels.masked_fill(torch.arange(60) < 5, -100)  # and some do not count
    held = [Held(likelihood.moments(latent), y)]
    kept = likelihood.free(held).at_scale(0.7)

    def loss(inverse: Tensor) -> Tensor:
        tempered = replace(likelihood, temperature=1 / inverse)
        return -tempered.log_predictive(held[0].moments.scaled(0.7), y).sum()

    for inverse in (0.02, 0.9, 30.0):
        first, second = (f(torch.tensor(inverse, dtype=F64)).item() for f in (grad(loss), grad(grad(loss))))
        assert kept.derivatives(inverse) == pytest.approx((first, second))
        torch.testing.assert_close(-kept.densities(torch.tensor(1 / inverse))[0].sum(), loss(torch.tensor(inverse)))
    bounds, ones = (math.log(1e-3), math.log(1e3)), torch.ones((), dtype=F64)
    found = minimise_convex(kept.derivatives, [ones], bounds, 60).item()
    assert found == pytest.approx(minimise(lambda t: loss(torch.tensor(1 / t)).item(), 1.0), rel=1e-5)
    for low, high, end in ((0.1, 0.5 * found, 0.5 * found), (2 * found, 40.0, 2 * found)):  # the best is outside
        bounds = (math.log(low), math.log(high))
        assert minimise_convex(kept.derivatives, [ones], bounds, 60).item() == pytest.approx(end)
    assert minimise_convex(lambda inverse: (0.0, 0.0), [30 * ones], bounds, 60).item() == pytest.approx(30.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_probability_of_zero_is_one_of_zero_at_any_temperature(dtype):
    """Classes that a link rules out do not stop the search for the temperature of the others."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 3, dtype=dtype, generator=generator)
    y = torch.randint(3, (200,), generator=generator)
    ruled_out = torch.cat([logits, torch.full((200, 1), -torch.inf, dtype=dtype)], 1)
    counted, starts, bounds = y >= 0, [torch.ones((), dtype=torch.float64)], TEMPERATURES
    three, four = (Tempered([gaps(each.log_softmax(-1), y, counted)]) for each in (logits, ruled_out))
    best = three.best(starts, bounds, 200)
    assert best > 1.5  # or the test is none
    torch.testing.assert_close(four.best(starts, bounds, 200), best, rtol=1e-4, atol=0)
    torch.testing.assert_close(four.densities(best), three.densities(best))
    (impossible,) = Tempered([gaps(ruled_out.log_softmax(-1), torch.full_like(y, 3), counted)]).densities(best)
    assert (impossible == -torch.inf).all()


# -- other likelihoods


def test_regression_recovers_scale_and_noise():
    x, y = regression()
    reg = Regressor(Latent())
    report = quiet(reg, loader(x, y), tolerance=0.0)
    assert reg.scale == pytest.approx(3.0, rel=0.15) and reg.noise == pytest.approx(0.5, rel=0.15)
    assert report.nlpd_after == pytest.approx(nlpd(reg(x), y))
    joint = Regressor(Latent()).fit_scale([(x, y)], fit_noise=True, progress=False).fit_report
    assert joint is not None and report.nlpd_after == pytest.approx(joint.nlpd_after, abs=1e-5)


def test_regression_is_never_worse_than_the_noise_alone():
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(300, 1, generator=g, dtype=F64)
    x = torch.cat([mean, 2 * torch.randn(300, 1, generator=g, dtype=F64)], 1)  # variances that say nothing
    y = mean + 0.7 * torch.randn(300, 1, generator=g, dtype=F64)
    report = quiet(Regressor(Latent()), [(x, y)], tolerance=0.0)
    alone = Regressor(lambda x: Gaussian(x[:, :1], torch.zeros(len(x), 1, dtype=F64)))
    assert report.nlpd_after <= quiet(alone, [(x, y)]).nlpd_after + 1e-5


def test_noise_per_output_keeps_its_form():
    x, y = regression(outputs=3, noise=[0.1, 1.0, 10.0])
    reg = Regressor(Latent())
    quiet(reg, loader(x, y))
    assert isinstance(reg.noise, Tensor) and reg.noise.shape == (3,) and (reg.noise.diff() > 0).all()


def test_nothing_free_leaves_the_scale_alone():
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(2000, 1, generator=g, dtype=F64)
    y = torch.poisson((mean + math.sqrt(2.0) * torch.randn(2000, 1, generator=g, dtype=F64)).exp(), generator=g)
    predictor = Predictor(lambda x: Gaussian(x, torch.ones_like(x)), PoissonLikelihood())
    report = quiet(predictor, [(mean, y)], tolerance=0.0)
    assert predictor.scale == pytest.approx(2.0, rel=0.25) and not report.own


# -- what it says


def test_report_is_shown():
    x, y = classification()
    clf = Classifier(Latent()).calibrate([(x, y)], progress=False)
    assert str(clf.fit_report) in repr(clf)
    for part in ("temperature", "NLPD", "400 points", "standard error", "without latent variance"):
        assert part in repr(clf)


def test_warns_when_the_plain_model_is_preferred():
    """Variances that are large exactly where the model is right."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 3, generator=g, dtype=F64)
    y = logits.argmax(1)
    y[::10] = (y[::10] + 1) % 3
    log_variance = torch.full_like(logits, 6.0)
    log_variance[::10] = -20.0
    with pytest.warns(UserWarning, match="prefer the plain model"):
        clf = Classifier(Latent()).calibrate([(torch.cat([logits, log_variance], 1), y)], progress=False)
    assert isinstance(clf.fit_report, Calibration) and clf.fit_report.is_plain and clf.scale < 1e-3


def test_warns_when_the_temperature_is_not_determined():
    """Every label is the most probable class: colder is always better."""
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    with pytest.warns(UserWarning, match="temperature is at the end of its range"):
        Classifier(MAP(nn.Identity())).calibrate([(logits, logits.argmax(1))], progress=False)


@pytest.mark.parametrize("door", [Classifier, BinaryClassifier])
def test_labels_of_one_class_calibrate_nothing(door):
    """The best scale, or temperature, would be at the end of its range."""
    x, _ = overconfident(60)
    y = torch.full((60,), 2) if door is Classifier else torch.ones(60, 3)
    predictor = door(Latent(), scale=0.5)
    with pytest.warns(UserWarning, match=r"nothing was calibrated: all \d+ labels are of class [12], which"):
        predictor.calibrate([(x, y)], progress=False)
    assert predictor.scale == 0.5 and predictor.temperature == 1 and "nothing was fitted: all" in repr(predictor)
    assert predictor.fit_report.nlpd_after == pytest.approx(nlpd(predictor(x), y), abs=1e-6)


def test_a_posterior_that_is_too_narrow_is_not_called_the_choice_of_the_data():
    x, y = overconfident()
    x[:, 3:] = math.log(1e-14)
    with pytest.warns(UserWarning, match="so narrow that predictions are those of the plain model: fit it again"):
        clf = Classifier(Latent()).calibrate([(x, y)], progress=False)
    assert clf.scale >= 1 and "so narrow" in repr(clf) and "prefer" not in repr(clf)


def test_a_bound_that_decided_is_named():
    report = Calibration("scale", 1.0, 1e20, 1.0, 0.5, 10, best=1e20, nlpd_best=0.5, bounds=(LOWEST, 1e20))
    assert report.at_bound and "the end of its range decided, not the data" in str(report)


def test_huge_variances_are_within_range():
    """`fit_scale` cannot shrink variances of 1e12 enough; here the plain model is always in reach."""
    x, y = overconfident()
    x = torch.cat([x[:, :3], x[:, 3:] + math.log(1e12)], 1)
    plain = TemperatureScaling(Means()).fit([(x, y)], progress=False).fit_report
    report = quiet(Classifier(Latent()), [(x.float(), y)], tolerance=0.0)
    assert plain is not None and report.nlpd_after <= plain.nlpd_after + 1e-5
    assert report.after < 1e-6 and LOWEST < 1e-29


def test_overflowing_latents_are_named_with_the_remedy():
    def wide(x):
        return Gaussian.diagonal(x, torch.full_like(x, math.inf))

    with pytest.raises(InputError, match=r"variances of 3 of 3 samples.*prior precision.*fewer.*linearise"):
        Classifier(wide).calibrate([(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))], progress=False)


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, "1", None])
def test_bad_tolerance(tolerance):
    with pytest.raises(InputError, match=r"tolerance is .* not negative"):
        Classifier(Latent()).calibrate([], tolerance=tolerance)


# -- the temperature goes where the classifier goes


def test_temperature_is_saved_exported_and_checked(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    net = streamline(model, fit_laplace(model, [(x, y)], progress=False), x[:2])
    clf = Classifier(net, temperature=1.7, scale=0.3)
    plain = Classifier(net, scale=0.3)
    expected = (plain.log_probs(x) / 1.7).log_softmax(-1)
    torch.testing.assert_close(clf.log_probs(x), expected)
    torch.testing.assert_close(clf(x).logits, expected)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.export.load(clf.export(tmp_path / "c.pt2")).module()(x)
    torch.testing.assert_close(found["probabilities"], expected.exp())

    loaded = Classifier(net)
    loaded.load_state_dict(clf.state_dict())
    assert loaded.temperature == 1.7 and loaded.scale == pytest.approx(0.3)
    with pytest.raises(InputError, match="temperature is 0"):
        Classifier(net, temperature=0)
    with pytest.raises(InputError, match="temperature is -1"):
        clf.temperature = -1
