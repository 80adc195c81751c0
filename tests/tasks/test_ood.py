"""Outlier scores and their evaluation: against scikit-learn, sampling and quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import gaussian_kde
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import nn

import propagauss as pg
from propagauss.tasks import ood


def latent(classes: int = 4, count: int = 6, full: bool = False) -> pg.Gaussian:
    torch.manual_seed(0)
    mean = 2 * torch.randn(count, classes, dtype=torch.float64)
    if not full:
        return pg.Gaussian(mean, variance=3 * torch.rand(count, classes, dtype=torch.float64))
    root = torch.randn(count, classes, classes, dtype=torch.float64)
    return pg.Gaussian(mean, covariance=root @ root.mT)


@pytest.mark.parametrize("ties", [False, True])
def test_evaluate_against_scikit_learn(ties):
    torch.manual_seed(0)
    inside, outside = torch.randn(300), torch.randn(170) + 1
    if ties:
        inside, outside = inside.round(), outside.round()
    found = ood.evaluate(inside, outside)
    scores, truth = torch.cat([inside, outside]).numpy(), np.repeat([0, 1], [300, 170])
    assert found.auroc == pytest.approx(roc_auc_score(truth, scores))
    assert found.aupr == pytest.approx(average_precision_score(truth, scores))
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert found.fpr95 == pytest.approx(false[true >= 0.95 - 1e-12].min())


def test_evaluate_at_the_ends():
    low, high = torch.linspace(0, 1, 50), torch.linspace(2, 3, 20)
    assert ood.evaluate(low, high) == (1.0, pytest.approx(1.0), 0.0)
    assert ood.evaluate(high, low).auroc == 0
    assert ood.evaluate(high, low).fpr95 == 1


@pytest.mark.parametrize("full", [False, True])
def test_mutual_information_against_sampling(full):
    g = latent(full=full)
    draws = g.sample((200_000,), torch.Generator().manual_seed(0))
    expected = ood.from_samples(draws)
    assert expected.mutual_information is not None
    torch.testing.assert_close(ood.mutual_information(g, 4096), expected.mutual_information, rtol=0, atol=5e-3)
    assert torch.equal(ood.mutual_information(g), ood.mutual_information(g))


def test_mutual_information_of_two_classes_against_integration():
    g = latent(classes=2, full=True)
    for n in range(len(g.mean)):
        c = g.covariance[n]
        m = (g.mean[n, 1] - g.mean[n, 0]).item()
        s = math.sqrt(c[0, 0] + c[1, 1] - 2 * c[0, 1])

        def over(f, m=m, s=s):
            return quad(lambda z: f(1 / (1 + math.exp(-(m + s * z)))) * math.exp(-z * z / 2), -12, 12)[0]

        p = over(lambda q: q) / math.sqrt(2 * math.pi)
        inner = over(entropy) / math.sqrt(2 * math.pi)
        assert ood.mutual_information(g)[n].item() == pytest.approx(entropy(p) - inner, abs=1e-9)


def entropy(p: float) -> float:
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)


@pytest.mark.parametrize("classes", [2, 3])
def test_no_variance_no_information(classes):
    mean = torch.randn(5, classes)
    assert ood.mutual_information(pg.Gaussian(mean, variance=torch.zeros_like(mean))).abs().max() < 1e-7


def net(classes: int = 3) -> tuple[nn.Module, pg.Streamlined, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes)).eval()
    x = torch.randn(20, 4)
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in model.named_parameters()})
    return model, pg.streamline(model, posterior, x, covariance="full"), x


@pytest.mark.parametrize("link", ["probit", "mean_field", "monte_carlo", "bridge"])
def test_scores_are_those_of_the_classifier(link):
    _, streamlined, x = net()
    classifier = pg.Classifier(streamlined, link, scale=0.5)
    found, predictive = ood.scores(classifier, x), classifier(x)
    torch.testing.assert_close(found.entropy, pg.metrics.predictive_entropy(predictive))
    torch.testing.assert_close(found.max_probability, predictive.probs.max(-1).values.double())
    torch.testing.assert_close(found.epistemic_variance, 0.5 * streamlined(x).variance.double().mean(-1))


def test_a_net_alone_a_loader_and_a_tuple():
    _, streamlined, x = net()
    whole = ood.scores(streamlined, x)
    loader = [(part, torch.zeros(len(part))) for part in x.split(7)]
    for other in (ood.scores(pg.Classifier(streamlined), (x,)), ood.scores(streamlined, loader)):
        for name, values in whole.by_name().items():
            torch.testing.assert_close(other.by_name()[name], values, rtol=1e-5, atol=1e-6)
    assert torch.equal(whole.by_name()["max_probability"], 1 - whole.max_probability)


def test_all_scores_at_once():
    _, streamlined, x = net()
    found = ood.evaluate_all(ood.scores(streamlined, x), ood.scores(streamlined, 10 * x))
    assert set(found) == {"entropy", "max_probability", "epistemic_variance", "mutual_information"}
    assert found["epistemic_variance"].auroc > 0.9
    plain = ood.from_probs(torch.rand(9, 3).softmax(-1))
    assert set(ood.evaluate_all(plain, ood.scores(streamlined, x))) == {"entropy", "max_probability"}


def test_density_against_scipy_and_as_the_paper_words_it():
    values, points = torch.randn(400, dtype=torch.float64), torch.linspace(-3, 3, 50, dtype=torch.float64)
    expected = gaussian_kde(values.numpy(), bw_method=0.25)(points.numpy())
    torch.testing.assert_close(ood.density(values, points), torch.from_numpy(expected))
    literal = ood.density(values, points, bandwidth=0.5, relative=False)
    assert literal.max() <= 1 / math.sqrt(2 * math.pi * 0.25)
    assert ood.density(torch.ones(5), torch.tensor([1.0])).isfinite().all()


def test_plot():
    a, b = torch.rand(50), torch.rand(40) + 1
    figure = ood.plot({"MAP": (a, b), "ours": (a, b)}, names=("known", "new"))
    assert [axis.get_title() for axis in figure.axes] == ["MAP", "ours"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ood.evaluate(torch.zeros(0), torch.zeros(3)), "inside"),
        (lambda: ood.evaluate(torch.zeros(3), torch.zeros(3, 1)), "outside"),
        (lambda: ood.evaluate(torch.tensor([math.nan]), torch.zeros(3)), "NaN"),
        (lambda: ood.density(torch.zeros(3), torch.zeros(3), bandwidth=0.0), "bandwidth"),
        (lambda: ood.plot({}), "nothing to plot"),
        (lambda: ood.from_samples(torch.zeros(3, 4)), "samples"),
        (lambda: ood.mutual_information(pg.Gaussian(torch.zeros(3), variance=torch.zeros(3))), "two classes"),
        (lambda: ood.mutual_information(latent(), samples=1), "at least 2"),
        (lambda: ood.Scores.cat([]), "no scores"),
        (lambda: ood.scores(net()[0], torch.zeros(2, 4)), "a Gaussian is needed"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(pg.InputError, match=message):
        call()
