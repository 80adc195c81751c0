"""Calls of a streamlined model: batch sizes, forms of arguments, uncertain inputs, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from engines.models import build, inputs, mlp, posterior_for
from reference import random_psd


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("example", [1, 2, 3])
@pytest.mark.parametrize("name", ["two inputs", "mixer", "one number"])
def test_any_batch_size_whatever_the_examples(name: str, example: int, covariance: str) -> None:
    model = build(name)
    net = pg.streamline(model, posterior_for(model, "diagonal"), inputs(name, batch=example), covariance=covariance)
    for batch in (0, 1, 2, 7):
        x = inputs(name, batch=batch)
        g = net(*x)
        torch.testing.assert_close(g.mean, model(*x).detach())
        assert g.variance.shape == g.mean.shape
        assert g.covariance.shape[0] == batch


def test_forms_of_the_example_and_of_calls() -> None:
    model, (x, y) = build("two inputs"), inputs("two inputs")
    posterior = posterior_for(model, "diagonal")
    expected = pg.streamline(model, posterior, (x, y))(x, y)
    by_position = pg.streamline(model, posterior, [x, y])
    by_name = pg.streamline(model, posterior, {"x": x, "y": y})
    for g in (by_position(x, y), by_position((x, y)), by_name(x=x, y=y), by_name({"x": x, "y": y})):
        assert torch.equal(g.mean, expected.mean) and torch.equal(g.variance, expected.variance)


def test_keyword_arguments_and_literals() -> None:
    model, (x,) = build("Python"), inputs("Python")
    mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64).expand(3, 3).contiguous()
    call = {"x": x, "power": 3.0, "mask": mask}
    net = pg.streamline(model, posterior_for(model, "diagonal"), call)
    g = net(**call)
    torch.testing.assert_close(g.mean, model(x, power=3.0, mask=mask).detach())
    assert torch.count_nonzero(g.variance[:, 1]) == 0 and (g.variance[:, 0] > 0).all()


def test_another_literal_than_the_examples_is_not_ignored() -> None:
    """A number is built into the traced graph, so a different one must not pass in silence."""
    model, (x,) = build("Python"), inputs("Python")
    net = pg.streamline(model, posterior_for(model, "diagonal"), {"x": x, "power": 3.0})
    with pytest.raises(pg.InputError, match=r"3\.0"):
        net(x=x, power=2.0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("uncertain", [(True, False), (False, True), (True, True)], ids=str)
def test_uncertain_inputs(uncertain: tuple[bool, bool], covariance: str) -> None:
    model, x = build("two inputs"), inputs("two inputs")
    given = [pg.Gaussian(v, 0.1 + v.square()) if u else v for v, u in zip(x, uncertain, strict=True)]
    posterior = posterior_for(model, "diagonal")
    net = pg.streamline(model, posterior, tuple(given), covariance=covariance)
    g = net(*given)
    torch.testing.assert_close(g.mean, model(*x).detach())
    increase = g.variance - pg.streamline(model, posterior, x)(*x).variance
    assert (increase >= 0).all() and (increase > 0).any()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_uncertain_inputs_of_either_structure(covariance: str) -> None:
    """The example's structure does not bind later inputs; a covariance is reduced where only variances are kept."""
    model, (x,) = build("MLP"), inputs("MLP")
    c = random_psd(3, 3, 0.1, torch.Generator().manual_seed(0))
    full = pg.Gaussian(x, covariance=c)
    diagonal = pg.Gaussian(x, full.variance)
    nets = [pg.streamline(model, posterior_for(model, "diagonal"), e, covariance=covariance) for e in (full, diagonal)]
    for given in (full, diagonal):
        a, b = (net(given) for net in nets)
        assert a.is_full == (covariance == "full")
        torch.testing.assert_close(a.covariance, b.covariance)
    if covariance == "diagonal":
        torch.testing.assert_close(nets[0](full).variance, nets[0](diagonal).variance)


@pytest.mark.parametrize("activation", ["linearise", "moments"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_gradients_reach_the_input(kind: str, covariance: str, activation: str) -> None:
    torch.manual_seed(0)
    model = mlp(nn.Tanh()).double()
    m = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    v = (0.1 + torch.rand(2, 3, dtype=torch.float64)).requires_grad_()
    example = pg.Gaussian(m.detach(), v.detach())
    net = pg.streamline(model, posterior_for(model, kind), example, covariance=covariance, activation=activation)

    def forward(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        g = net(pg.Gaussian(mean, variance))
        return g.mean, g.variance

    assert torch.autograd.gradcheck(forward, (m, v), fast_mode=True)
    for gradient in torch.autograd.grad(forward(m, v)[1].sum(), (m, v)):
        assert (gradient != 0).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "activation, covariance", [("linearise", "diagonal"), ("linearise", "full"), ("moments", "full")]
)
def test_grad_modes(mode: Any, activation: str, covariance: str) -> None:
    model, (x,) = build("SwiGLU"), inputs("SwiGLU")
    posterior = posterior_for(model, "diagonal")
    expected = pg.streamline(model, posterior, x, covariance=covariance, activation=activation)(x)
    with mode():
        net = pg.streamline(model, posterior, x, covariance=covariance, activation=activation)
        g = net(x)
    torch.testing.assert_close(g.mean, expected.mean)
    torch.testing.assert_close(g.covariance, expected.covariance)
    assert not expected.mean.requires_grad  # nothing in a net is trainable
