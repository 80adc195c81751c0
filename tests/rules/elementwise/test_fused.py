"""Functions of several ops as one: comparisons, limits that are tensors, slopes that are parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import propagauss as pg
from propagauss.rules.elementwise.activation import MomentMatched, elementwise
from reference import random_psd
from rules.cases import Call
from rules.elementwise.functions import FUSED, MEANS, Fused, each_fused, grid, integrals, traced

SAMPLES = 200_000


def test_fused_functions_use_quadrature() -> None:
    """`x sigmoid(x)` written out is one function of `x`: the same moments as the single op."""
    x = pg.Gaussian(torch.tensor([[0.3, -1.2]], dtype=torch.float64), torch.tensor([[0.5, 2.0]], dtype=torch.float64))
    pieces = pg.streamline(Call(lambda t: t * torch.sigmoid(t)).eval(), None, x, activation="moments")(x)
    whole = pg.streamline(nn.SiLU().eval(), None, x, activation="moments")(x)
    torch.testing.assert_close(pieces.mean, whole.mean)
    torch.testing.assert_close(pieces.variance, whole.variance)


@each_fused
def test_comparisons_are_part_of_the_function(case: Fused) -> None:
    graph = traced(case.function)
    rule = elementwise(graph, "moments", torch.float64, graph=graph)
    assert isinstance(rule, MomentMatched) and (rule.pieces is not None) == case.exact
    m, v = grid([*MEANS, *case.knots])
    mean, variance, slope = rule.moments(m, v)
    e_mean, e_variance, e_slope = integrals(case.function, m, v, case.knots)
    tolerance = 1e-6 if case.exact else 2e-4
    assert ((mean - e_mean).abs() <= tolerance * e_variance.sqrt() + 1e-9 * e_mean.abs() + 1e-12).all()
    torch.testing.assert_close(variance, e_variance, rtol=tolerance, atol=1e-12)
    torch.testing.assert_close(slope, e_slope, rtol=tolerance, atol=1e-5)
    still, none, _ = rule.moments(m, torch.zeros_like(m))
    torch.testing.assert_close(still, case.function(m))
    assert none.abs().max() <= 1e-15


class Rule(nn.Module):
    """A rule as a network of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor], op: Any = None):
        super().__init__()
        graph = traced(function)
        self.rule = elementwise(graph, "moments", torch.float64, op, graph=graph)

    def forward(self, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.rule.moments(m, v)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["band", "softsign", "gated tanh"])
def test_exported_and_compiled_equal_eager(name: str) -> None:
    """Pieces, panels, and panels whose borders are searched for."""
    (case,) = (c for c in FUSED if c.name == name)
    rule, at = Rule(case.function), grid([-0.8, 0.2, 1.3], [0.0, 0.1, 4.0])
    expected = rule(*at)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(rule, at, dynamic_shapes=({0: batch}, {0: batch}), strict=False).module()
    torch._dynamo.reset()
    compiled = torch.compile(rule, fullgraph=True, backend="eager")
    for found in (exported(*at), compiled(*at)):
        torch.testing.assert_close(found, expected)


def test_limits_that_are_tensors() -> None:
    """They are known at run time only, so that the borders of the panels are computed there."""
    limit = torch.tensor([0.3, -0.4], dtype=torch.float64)
    function = lambda x, t: torch.where(x > 2 * t, x, t)  # noqa: E731
    program = torch.export.export(Call(function), (torch.ones(3, 2, dtype=torch.float64), limit), strict=False)
    graph, env = fx.Graph(), {}
    for node in program.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[list(program.graph.nodes)[-1].args[0][0]])
    module = fx.GraphModule(nn.Module(), graph)
    rule = elementwise(module, "moments", torch.float64, graph=module)
    m = torch.tensor([[0.5, -0.7], [0.1, 0.2], [2.0, -3.0]], dtype=torch.float64)
    v = torch.tensor([[0.2, 0.4], [1.0, 9.0], [1e-3, 4.0]], dtype=torch.float64)
    out = rule(pg.Gaussian(m, v), limit)
    for i, t in enumerate(limit.tolist()):
        e_mean, e_variance, _ = integrals(lambda x, t=t: torch.where(x > 2 * t, x, t), m[:, i], v[:, i], (2 * t,))
        torch.testing.assert_close(out.mean[:, i], e_mean, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(out.variance[:, i], e_variance, rtol=1e-6, atol=1e-12)


# -- PReLU


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("random", [False, True], ids=["fixed slope", "random slope"])
def test_prelu(structure: str, random: bool) -> None:
    """The slope is one per channel; a random one is independent of the input."""
    m = torch.tensor([[[-0.8, 0.2], [1.3, -0.4]], [[0.1, -2.1], [-0.3, 0.0]]], dtype=torch.float64)
    c = random_psd(4, 2, 0.7, torch.Generator().manual_seed(1))
    c = c if structure == "full" else torch.diag_embed(c.diagonal(dim1=1, dim2=2))
    x = (
        pg.Gaussian(m, covariance=c)
        if structure == "full"
        else pg.Gaussian(m, c.diagonal(dim1=1, dim2=2).view(2, 2, 2))
    )
    model = nn.PReLU(2).double().eval()
    model.weight.data = torch.tensor([0.2, 0.6], dtype=torch.float64)
    variance = torch.tensor([0.3, 0.5], dtype=torch.float64)
    posterior = pg.DiagonalPosterior({"weight": variance}) if random else None
    out = pg.streamline(model, posterior, x, covariance=structure, activation="moments")(x)
    generator = torch.Generator().manual_seed(0)
    values = x.sample((SAMPLES,), generator)
    noise = torch.randn(SAMPLES, 1, 2, 1, generator=generator, dtype=torch.float64) * variance.sqrt().view(2, 1)
    slopes = model.weight.detach().view(2, 1) + (noise if random else 0)
    values = torch.where(values > 0, values, slopes * values).flatten(2)
    mean, deviation = values.mean(0), values - values.mean(0)
    sampled = deviation.square().mean(0)
    error = ((deviation**4).mean(0) - sampled.square()).sqrt() / (SAMPLES) ** 0.5
    assert ((out.mean.flatten(1) - mean).abs() <= 6 * (sampled / (SAMPLES)).sqrt()).all()
    assert ((out.variance.flatten(1) - sampled).abs() <= 6 * error).all()
    if structure == "full":
        assert torch.linalg.eigvalsh(out.covariance).min() > 0
        joint = torch.einsum("sbi,sbj->bij", deviation, deviation) / (SAMPLES)
        assert (out.covariance - joint).abs().max() <= 0.1 * joint.abs().max()  # off the diagonal: Hermite's first term
