"""Where rules are exact at any variance: against sampling and numerical integration. And what float32 makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from referee.case import Case, case, linear
from referee.cases import BATTERY
from referee.truth import Mode, random_posterior

SAMPLES = 40_000
SUMS = [
    case("linear", lambda m, x: m.l(x), l=linear()),
    case("sum of layers", lambda m, x: m.l(x) - 2 * m.k(x), l=linear(), k=linear()),
    case("product of layers", lambda m, x: m.l(x) * m.k(x), l=linear(), k=linear()),
    case("two layers", lambda m, x: m.k(m.l(x)), l=linear(), k=linear(4, 3)),
    case("pooled convolution", lambda m, x: m.c(x).mean(-1), c=lambda: nn.Conv1d(2, 3, 2), x=(2, 4)),
]


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("one", SUMS, ids=str)
def test_sums_and_products_at_large_variances(one: Case, structure: str) -> None:
    """In full mode, as the pooled convolution shares its weights over positions."""
    model, inputs, names = one.build()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    posterior, dense = random_posterior(shapes, structure, one.generator(), scale=0.3)
    g = pg.streamline(model, posterior, inputs, covariance="full")(*inputs)
    drawn = _sampled(model, inputs, {n: shapes[n] for n in names}, dense)
    scale = drawn.var(0).max()
    assert torch.allclose(drawn.var(0), g.variance, rtol=0.06, atol=0.02 * float(scale))
    assert torch.allclose(drawn.mean(0), g.mean, atol=5 * float((scale / SAMPLES).sqrt()))


def _sampled(model: nn.Module, inputs: tuple[Tensor, ...], shapes: dict[str, torch.Size], dense: Tensor) -> Tensor:
    mean = torch.cat([p.detach().flatten() for p in model.parameters()])
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(SAMPLES, len(mean), dtype=torch.float64, generator=generator)
    draws = (mean + white @ torch.linalg.cholesky(dense).mT).split([s.numel() for s in shapes.values()], dim=1)
    weights = {n: d.reshape(-1, *s) for (n, s), d in zip(shapes.items(), draws, strict=True)}
    with torch.no_grad():
        return torch.vmap(lambda w: torch.func.functional_call(model, w, inputs))(weights)


# -- activation="moments"

# by name, the function and where it has kinks or jumps
PIECEWISE: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...]]] = {
    "relu": (torch.relu, (0.0,)),
    "leaky relu": (lambda z: F.leaky_relu(z, 0.2), (0.0,)),
    "prelu": (lambda z: F.prelu(z, torch.full((1,), 0.2, dtype=z.dtype)), (0.0,)),
    "relu6": (F.relu6, (0.0, 6.0)),
    "abs": (torch.abs, (0.0,)),
    "clamp": (lambda z: z.clamp(-0.5, 0.7), (-0.5, 0.7)),
    "hardtanh": (F.hardtanh, (-1.0, 1.0)),
    "hard sigmoid": (F.hardsigmoid, (-3.0, 3.0)),
    "threshold": (lambda z: F.threshold(z, 0.3, -1.0), (0.3,)),
    "hard shrinkage": (F.hardshrink, (-0.5, 0.5)),
    "soft shrinkage": (F.softshrink, (-0.5, 0.5)),
    "where, by its sign": (lambda z: torch.where(z > 0, z, 0.0), (0.0,)),
    "times its own mask": (lambda z: z * (z > 0), (0.0,)),
}
SMOOTH: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...]]] = {
    **{f.__name__: (f, ()) for f in (torch.sin, torch.cos, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.softplus)},
    "exp": (lambda z: torch.exp(0.5 * z), ()),
    "square": (torch.square, ()),
}


@pytest.mark.parametrize("mode", ["full", "diagonal"])
@pytest.mark.parametrize(
    ("functions", "variances", "tolerance"),
    [(PIECEWISE, (0.05, 1.0, 100.0), 1e-6), (SMOOTH, (0.05, 1.0), 1e-3)],
    ids=["piecewise", "smooth"],
)
def test_moments(functions: dict[str, Any], variances: tuple[float, ...], tolerance: float, mode: Mode) -> None:
    """`f(x + b)` for all functions at once, entries with different variances of `b`."""
    variance = torch.tensor(variances, dtype=torch.float64).repeat_interleave(2)
    every = [f for f, _ in functions.values()]
    one = case("moments", lambda m, x: tuple(f(x + m.b) for f in every), b=(len(variance),), x=(len(variance),))
    model, (x,), _ = one.build()
    found = pg.streamline(model, pg.DiagonalPosterior({"b": variance}), x, covariance=mode, activation="moments")(x)
    mean = x + next(model.parameters()).detach()
    wrong = {}
    for (name, (f, breaks)), g in zip(functions.items(), found, strict=True):
        first, sd = _integrated(f, breaks, mean, variance.sqrt().expand_as(mean))
        error = torch.maximum((g.stddev - sd).abs(), (g.mean - first).abs()).amax(0) / sd.amax(0)
        if not float(error.max()) < tolerance:
            wrong[name] = {v: f"{float(e):.2g}" for v, e in zip(variance.tolist(), error, strict=True)}
    assert not wrong, f"relative errors by variance: {wrong}"


def _integrated(
    f: Callable[[Tensor], Tensor], breaks: tuple[float, ...], mean: Tensor, sd: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of `f` of a Gaussian: Gauss-Legendre on panels that end at the breaks."""
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(40))
    ends = torch.linspace(-9, 9, 37, dtype=torch.float64).expand(*mean.shape, -1)
    cuts = [((b - mean) / sd).clamp(-9, 9).unsqueeze(-1) for b in breaks]
    ends = torch.cat([ends, *cuts], -1).sort(-1).values
    middle, half = (ends[..., 1:] + ends[..., :-1]) / 2, (ends[..., 1:] - ends[..., :-1]) / 2
    z = (middle.unsqueeze(-1) + half.unsqueeze(-1) * nodes).flatten(-2)
    p = (half.unsqueeze(-1) * weights).flatten(-2) * torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    values = f(mean.unsqueeze(-1) + sd.unsqueeze(-1) * z)
    first = (values * p).sum(-1)
    return first, ((values - first.unsqueeze(-1)).square() * p).sum(-1).sqrt()


# -- single precision

_IN_FLOAT32 = [(c, ("full", "diagonal")[i // 28 % 2]) for i, c in enumerate(BATTERY) if i % 28 == 0]


@pytest.mark.parametrize(("one", "mode"), _IN_FLOAT32, ids=str)
def test_float32_agrees_with_float64(one: Case, mode: Mode) -> None:
    model, inputs, names = one.build()
    shapes = {n: p.shape for n, p in model.named_parameters() if n in names}
    posterior, _ = random_posterior(shapes, "diagonal", one.generator(), scale=1e-3)
    try:
        double = _gaussians(pg.streamline(model, posterior, inputs, covariance=mode)(*inputs))
    except pg.PropagaussError:
        pytest.skip("refused")
    short = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    net = pg.streamline(model.float(), posterior.to(torch.float32), short, covariance=mode)
    for a, b in zip(_gaussians(net(*short)), double, strict=True):
        assert a.mean.dtype == torch.float32
        scale = float(b.variance.max())
        assert torch.allclose(a.mean.double(), b.mean, rtol=1e-4, atol=1e-4 * float(b.mean.abs().max()))
        assert torch.allclose(a.variance.double(), b.variance, rtol=1e-3, atol=1e-4 * scale + 1e-12)


def _gaussians(result: Any) -> list[pg.Gaussian]:
    return [g for g in (result if isinstance(result, tuple) else [result]) if isinstance(g, pg.Gaussian)]


@pytest.mark.parametrize("mode", ["full", "diagonal"])
def test_very_large_inputs_are_an_error(mode: Mode) -> None:
    """Squares overflow in float32: an error must say so, never a class."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-2) for n, p in model.named_parameters()})
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    predict = pg.Classifier(pg.streamline(model, posterior, x, covariance=mode))
    with pytest.raises(pg.InputError, match="not finite"):
        predict(1e25 * x)
