"""Gradients of moments, by the mean and by the variance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import propagauss as pg
from propagauss.rules.elementwise.activation import MomentMatched, elementwise
from reference import random_psd
from rules.elementwise.functions import STRETCHED, Function, Fused, each, each_fused, rule_of, traced


@each
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_gradients(g: Function, structure: str) -> None:
    m = torch.tensor([[-0.8, 0.2], [1.3, -0.1]], dtype=torch.float64)
    c = random_psd(2, 2, 0.5, torch.Generator().manual_seed(2))
    stored = c if structure == "full" else c.diagonal(dim1=1, dim2=2).clone()
    make: Callable[..., pg.Gaussian] = pg.Gaussian.full if structure == "full" else pg.Gaussian.diagonal
    rule = rule_of(g)

    def forward(mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        out = rule(make(mean, s))
        return out.mean, out.covariance if structure == "full" else out.variance

    assert torch.autograd.gradcheck(forward, (m.clone().requires_grad_(), stored.clone().requires_grad_()))


@each
def test_gradients_are_finite_without_variance(g: Function) -> None:
    m = torch.tensor([-0.8, 0.2, 1.3], dtype=torch.float64, requires_grad=True)
    v = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    out = rule_of(g)(pg.Gaussian.diagonal(m, v))
    for value in (out.mean, out.variance):
        for gradient in torch.autograd.grad(value.sum(), (m, v), retain_graph=True):
            assert gradient.isfinite().all()
    by_variance = torch.autograd.grad(out.variance.sum(), v)[0]
    derivative = torch.func.jvp(g, (m.detach(),), (torch.ones(3, dtype=torch.float64),))[1]
    torch.testing.assert_close(by_variance, derivative.square(), rtol=1e-4, atol=1e-6)


@each_fused
def test_fused_gradients(case: Fused) -> None:
    """Where a function jumps, its moments move with the jump: what is chosen is not constant for derivatives."""
    graph = traced(case.function)
    rule = elementwise(graph, "moments", torch.float64, graph=graph)
    assert isinstance(rule, MomentMatched)
    m = torch.tensor([[-0.8, 0.2], [1.3, -0.1]], dtype=torch.float64, requires_grad=True)
    v = torch.tensor([[0.5, 0.2], [1.1, 2.3]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *at: rule.moments(*at)[:2], (m, v), rtol=3e-3, atol=1e-4)


@pytest.mark.parametrize("name", STRETCHED)
def test_gradients_at_any_scale(name: str) -> None:
    """Nodes move with the mean and the variance, and so a kink is smooth in both."""
    graph = traced(STRETCHED[name])
    rule = elementwise(graph, "moments", torch.float64, graph=graph)
    assert isinstance(rule, MomentMatched)
    m = torch.tensor([-7.0, 0.2, 1.3, -0.1], dtype=torch.float64, requires_grad=True)
    v = torch.tensor([1e-2, 0.5, 9.0, 400.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rule.moments, (m, v))
