"""Half precision: variances stay in float32 under torch.autocast."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg


class Attention(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(width, 3 * width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


CASES: list[Any] = [
    pytest.param(mlp, (6, 16), id="MLP"),
    pytest.param(cnn, (4, 3, 6, 6), id="CNN"),
    pytest.param(Attention, (4, 5, 16), id="attention"),
]


def posterior(model: nn.Module) -> pg.Posterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, 1e-3) for n, p in model.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("make", "shape"), CASES)
def test_autocast(make: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model, x = make().eval(), torch.randn(shape)
    net = pg.streamline(model, posterior(model), x)
    exact = net(x)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        y, g = model(x), net(x)
    assert g.mean.dtype == y.dtype
    torch.testing.assert_close(g.mean, y, rtol=0.02, atol=0.02)
    assert g.variance.dtype == torch.float32
    torch.testing.assert_close(g.variance, exact.variance, rtol=0.05, atol=1e-4)


def test_squares_do_not_overflow() -> None:
    """300² is more than half precision can hold."""
    model, x = nn.Linear(4, 2).eval(), torch.full((1, 4), 300.0)
    net = pg.streamline(model, posterior(model), x)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        g = net(x)
    torch.testing.assert_close(g.variance, net(x).variance)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_kronecker_posterior(covariance: Literal["diagonal", "full"]) -> None:
    model, x = mlp().eval(), torch.randn(32, 16)
    random = pg.fit_laplace(model, [(x, torch.randint(5, (32,)))], structure="kronecker", progress=False)
    net = pg.streamline(model, random, x[:2], covariance=covariance)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        g = net(x)
    assert g.mean.dtype == torch.bfloat16 and g.covariance.dtype == torch.float32
    torch.testing.assert_close(g.variance, net(x).variance, rtol=0.1, atol=1e-3)


def test_low_rank() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(8, 64)
    net = pg.streamline(model, posterior(model), x, variance_tolerance=0.2)
    assert "low rank in 2 of 2" in net.plan.notes[-1]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        g = net(x)
    assert g.variance.dtype == torch.float32
    torch.testing.assert_close(g.variance, net(x).variance, rtol=0.05, atol=1e-4)


def test_predictions() -> None:
    model, x = mlp().eval(), torch.randn(6, 16)
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        probs = classifier(x).probs
    torch.testing.assert_close(probs.float(), classifier(x).probs.detach(), rtol=0.03, atol=0.01)


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_a_model_in_bfloat16(make: Any, shape: tuple[int, ...]) -> None:
    """All of it in that precision, variances too: nothing asks for another."""
    model, x = make().eval().bfloat16(), torch.randn(shape).bfloat16()
    net = pg.streamline(model, posterior(model), x)
    with torch.no_grad():
        g = net(x)
    assert g.mean.dtype == g.variance.dtype == torch.bfloat16
    torch.testing.assert_close(g.mean, model(x).detach(), rtol=0.05, atol=0.05)
