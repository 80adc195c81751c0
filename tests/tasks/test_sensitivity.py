"""Sensitivity maps against a plain optimiser, a case with a known answer, and wrong input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import propagauss as pg
from propagauss.tasks import sensitivity


def model(inputs: int = 5, classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes)).double().eval()


def uncertain(x: torch.Tensor) -> pg.Gaussian:
    return pg.Gaussian(x[:2], variance=torch.zeros_like(x[:2]))


def data(inputs: int = 5, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, inputs, dtype=torch.float64), torch.arange(count) % 3


def posterior(net: nn.Module, variance: float = 0.01) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in net.named_parameters()})


@pytest.mark.parametrize("link", ["probit", "mean_field", "monte_carlo", "bridge"])
@pytest.mark.parametrize("bayes", [False, True])
def test_equals_adam_on_each_input_alone(link, bayes):
    net, (x, y) = model(), data(count=2)
    streamlined = pg.streamline(net, posterior(net) if bayes else None, uncertain(x))
    classifier = pg.Classifier(streamlined, link)
    found = sensitivity.estimate(classifier, x, y, tolerance=0.02, learning_rate=0.1, progress=False)
    assert found.converged.all()
    for n in range(len(x)):
        expected, steps = literal(classifier, x[n : n + 1], y[n : n + 1], 0.02, 0.1)
        assert steps == found.steps[n]
        torch.testing.assert_close(found.log_variance[n : n + 1], expected, rtol=1e-8, atol=1e-8)


def literal(classifier, x, y, tolerance, rate):
    """The paper's loss and stopping rule with torch.optim.Adam."""
    log_s = torch.full_like(x, math.log(1e-5) / 2).requires_grad_()
    optimiser = torch.optim.Adam([log_s], rate, eps=1e-12)
    before = None
    for step in range(10_000):
        nlpd = -classifier(pg.Gaussian(x, variance=(2 * log_s).exp())).log_prob(y).sum()
        before = nlpd.item() if before is None else before
        if abs(nlpd.item() - before) > tolerance:
            return 2 * log_s.detach(), step
        entropy = torch.distributions.Normal(x, log_s.exp()).entropy().sum()
        optimiser.zero_grad()
        (nlpd - entropy).backward()
        optimiser.step()
    raise AssertionError


def test_only_entries_that_matter_lag_behind():
    linear = nn.Linear(4, 2).double().eval()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[3.0, 1.0, 0.1, 0.0], [-3.0, -1.0, -0.1, 0.0]]))
        linear.bias.zero_()
    x, y = torch.tensor([[1.0, 1.0, 1.0, 1.0]], dtype=torch.float64), torch.tensor([0])
    net = pg.streamline(linear, None, uncertain(x.repeat(2, 1)))
    for weight in (1.0, 0.25):
        found = sensitivity.estimate(net, x, y, learning_rate=0.02, entropy_weight=weight, progress=False)
        variance = found.variance[0]
        assert found.converged.all() and variance[0] < variance[1] < variance[2] < variance[3]
        assert found.maps[0, 0] == 1 and found.maps[0, 3] == 0
        torch.testing.assert_close(found.stddev, found.variance.sqrt())
    assert variance[3] / variance[0] > 1.5  # the levels themselves differ with the smaller weight


def test_single_precision_gives_the_maps_of_double_precision():
    net, (x, y) = model(), data()
    double = sensitivity.estimate(pg.streamline(net, None, uncertain(x)), x, y, learning_rate=0.02, progress=False)
    single_net = pg.streamline(model().float(), None, uncertain(x.float()))
    single = sensitivity.estimate(single_net, x.float(), y, learning_rate=0.02, progress=False)
    torch.testing.assert_close(single.maps.double(), double.maps, rtol=0, atol=0.02)


def test_images_and_what_comes_back():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 16, 3)).eval()
    x, y = torch.randn(3, 1, 6, 6), torch.tensor([0, 1, 2])
    found = sensitivity.estimate(pg.streamline(net, None, uncertain(x)), x, y, learning_rate=0.1, progress=False)
    assert found.variance.shape == found.maps.shape == x.shape
    assert ((found.nlpd_after - found.nlpd_before).abs() > 0.1).equal(found.converged)
    assert "3 inputs, 2 converged" in str(found)
    assert len(found.plot().axes) == 6


def test_a_tolerance_out_of_reach_is_a_flag_and_no_overflow():
    net, (x, y) = model(), data()
    with torch.no_grad():
        net[2].weight.mul_(1e-3)
        net[2].bias.zero_()  # all classes are equal from the start, with any noise
    found = sensitivity.estimate(
        pg.streamline(net.float(), None, uncertain(x.float())), x.float(), y, learning_rate=1.0, progress=False
    )
    assert not found.converged.any() and (found.steps < 5000).all()
    assert found.nlpd_after.isfinite().all() and found.maps.isfinite().all() and found.variance.isfinite().all()


def test_plot_of_vectors():
    net, (x, y) = model(), data()
    found = sensitivity.estimate(pg.streamline(net, None, uncertain(x)), x, y, max_steps=3, progress=False)
    assert len(found.plot(names=list("abcd")).axes) == 8
    with pytest.raises(pg.InputError, match="2 names for 4 maps"):
        found.plot(names=["a", "b"])


def test_running_out_of_steps_is_a_flag():
    net, (x, y) = model(), data()
    found = sensitivity.estimate(pg.streamline(net, None, uncertain(x)), x, y, max_steps=5, progress=False)
    assert not found.converged.any() and (found.steps == 5).all()


def test_the_net_and_the_inputs_are_left_alone():
    net, (x, y) = model(), data()
    before = {n: p.clone() for n, p in net.named_parameters()}
    copy = x.clone()
    with torch.no_grad():
        sensitivity.estimate(pg.streamline(net, None, uncertain(x)), x, y, max_steps=5, progress=False)
    assert torch.equal(x, copy) and all(torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 1, 2, 3])}, "3 classes"),
        ({"labels": torch.tensor([0, 1])}, "labels have shape"),
        ({"labels": torch.zeros(4)}, "must be integers"),
        ({"x": torch.zeros(0, 5, dtype=torch.float64)}, "at least one"),
        ({"x": torch.zeros(4, 5, dtype=torch.int64)}, "floating-point"),
        ({"x": torch.full((4, 5), math.nan, dtype=torch.float64)}, "not finite"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"start": -1.0}, "start is -1.0"),
        ({"entropy_weight": 0.0}, "entropy_weight"),
        ({"max_steps": 0}, "max_steps"),
    ],
)
def test_wrong_input(change, message):
    net, (x, y) = model(), data()
    arguments = {"x": x, "labels": y, "progress": False} | change
    with pytest.raises(pg.InputError, match=message):
        sensitivity.estimate(pg.streamline(net, None, uncertain(x)), **arguments)


def test_wrong_nets():
    net, (x, y) = model(), data()
    with pytest.raises(pg.InputError, match="Gaussian"):
        sensitivity.estimate(pg.streamline(net, posterior(net), x), x, y)
    with pytest.raises(pg.InputError, match="does not take a Gaussian"):
        sensitivity.estimate(net, x, y)
