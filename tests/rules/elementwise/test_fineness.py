"""Panels are as fine as a function needs, and the plan says up to which standard deviation its moments are right."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import propagauss as pg
from propagauss.rules.elementwise.quadrature.fineness import split_panels
from propagauss.rules.elementwise.quadrature.panels import BASE
from rules.cases import Call

MEANS = torch.tensor([-7.3, -2.2, -0.9, 0.1, 0.45, 1.3, 4.4], dtype=torch.float64).unsqueeze(1)


def integrals(g: Callable[[Tensor], Tensor], m: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """`E[g]` and `√Var[g]` by a sum over 400,000 equidistant points."""
    z = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    mass = torch.exp(-0.5 * z * z)
    mass /= mass.sum()
    found = []
    for mean in m.flatten():
        y = g(mean + s * z)
        centre = (mass * y).sum()
        found.append((centre, (mass * (y - centre).square()).sum().sqrt()))
    return tuple(torch.stack(each).view_as(m) for each in zip(*found, strict=True))  # type: ignore[return-value]


# how a function is written -> the function, and the standard deviation up to which its moments have to be right
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "x sin 5x": (lambda x: x * (5 * x).sin(), 4.0),
    "a bump": (lambda x: (-x * x).exp(), 10.0),
    "a narrow bump": (lambda x: (-100 * x * x).exp(), 1.0),
    "snake": (lambda x: x + (3 * x).sin().square() / 3, 10.0),
    "sinc": (torch.sinc, 10.0),
    "where the sine is large": (lambda x: torch.where(x.sin() > 0.3, x, 0.0), 4.0),
}


@pytest.fixture(scope="module", params=FUNCTIONS)
def case(request: pytest.FixtureRequest) -> tuple[Callable[[Tensor], Tensor], float, pg.Streamlined]:
    function, reach = FUNCTIONS[request.param]
    example = pg.Gaussian(MEANS, torch.ones_like(MEANS))
    return function, reach, pg.streamline(Call(function).eval(), None, example, activation="moments")


def test_oscillations_and_bumps(case: tuple[Callable[[Tensor], Tensor], float, pg.Streamlined]) -> None:
    function, reach, net = case
    for s in (0.1, 0.7, 1.0, 2.0, 4.0, 10.0):
        if s > reach:
            break
        found = net(pg.Gaussian(MEANS, torch.full_like(MEANS, s * s)))
        mean, deviation = integrals(function, MEANS, s)
        assert ((found.mean - mean).abs() <= 3e-3 * deviation + 1e-9).all(), s
        assert ((found.variance.sqrt() - deviation).abs() <= 3e-3 * deviation + 1e-9).all(), s


def test_the_plan_says_where_that_ends(case: tuple[Callable[[Tensor], Tensor], float, pg.Streamlined]) -> None:
    """Or moments are right up to a standard deviation of 100."""
    _, reach, net = case
    *_, step = net.plan
    said = re.search(r"up to (\S+)$", step.note)
    assert (float(said[1]) if said else 100.0) >= reach


@pytest.mark.parametrize("function", [torch.round, torch.floor, torch.frac])
def test_jumps_without_a_comparison_are_only_rough(function: Callable[[Tensor], Tensor]) -> None:
    example = pg.Gaussian(MEANS, torch.ones_like(MEANS))
    *_, step = pg.streamline(Call(function).eval(), None, example, activation="moments").plan
    assert "too coarse for this function" in step.note


def test_known_activations_need_no_finer_panels() -> None:
    """Those that are often used in several ops, such as this sigmoid, cost what they did."""
    example = pg.Gaussian(MEANS, torch.ones_like(MEANS))
    net = pg.streamline(Call(lambda x: x.exp() / (1 + x.exp())).eval(), None, example, activation="moments")
    (base,) = (buffer for name, buffer in net.named_buffers() if name.endswith("base"))
    assert base.tolist() == list(BASE)


def test_split_panels() -> None:
    base = split_panels(4, torch.float64)
    assert base.tolist()[::4] == list(BASE) and (base.diff() > 0).all() and len(base) == 4 * (len(BASE) - 1) + 1
