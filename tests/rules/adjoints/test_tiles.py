"""Jacobians of 3 x 3 convolutions by tiles: equal to those by patches, and taken where they pay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import propagauss as pg
from propagauss.baselines import GLM
from propagauss.passes.backwards.shortcuts import images
from propagauss.rules.adjoints import tiles
from propagauss.rules.adjoints.forms import Independent
from propagauss.rules.adjoints.positions import SharedLayer
from propagauss.rules.adjoints.tiles import TiledConvolution, tiles_pay

K, B, O, I = 3, 2, 5, 4


@pytest.mark.parametrize("block", [1, 10**6])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("size", "padding"), [((7, 10), [1, 1]), ((8, 8), [0, 2]), ((3, 5), [2, 1])], ids=["odd", "even", "small"]
)
def test_equal_to_patches(
    size: tuple[int, int], padding: list[int], full: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "BLOCK_ENTRIES", block)
    torch.manual_seed(0)
    x = torch.randn(B, I, *(n + 2 - 2 * p for n, p in zip(size, padding, strict=True))).double()
    g, layer = torch.randn(K, B, O, *size).double(), Independent(torch.rand(O, 9 * I).double(), torch.rand(O), None)
    patches = F.unfold(x, 3, padding=tuple(padding))
    truth = SharedLayer(layer, full)(g.flatten(3), patches, total := torch.rand(()).double())
    form = TiledConvolution(layer, full, padding)
    torch.testing.assert_close(form(g, x, total), truth, rtol=1e-12, atol=0)
    assert form(g[:, :0], x[:0]).shape == truth[:0].shape


def test_rounding_in_single_precision() -> None:
    torch.manual_seed(0)
    g, x, variance = torch.randn(K, B, 64, 32, 32), torch.randn(B, 64, 32, 32).relu(), torch.rand(64, 576)
    exact = TiledConvolution(Independent(variance.double(), None, None), False, [1, 1])(g.double(), x.double())
    found = TiledConvolution(Independent(variance, None, None), False, [1, 1])(g, x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_the_choice_goes_by_count() -> None:
    assert tiles_pay(32, 32, 64)  # the first stages of ResNets
    assert tiles_pay(56, 56, 64)
    assert tiles_pay(28, 28, 128)
    assert not tiles_pay(16, 16, 128)
    assert not tiles_pay(56, 56, 3)


def tiled(net: nn.Module) -> int:
    return sum(isinstance(m, TiledConvolution) for m in net.modules())


def test_only_convolutions_that_slide_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "tiles_pay", lambda *_: True)
    torch.manual_seed(0)
    convolutions = [
        nn.Conv2d(2, 3, 3, padding=(1, 2)),
        nn.Conv2d(3, 3, 3, stride=2),
        nn.Conv2d(3, 4, 3, dilation=2, padding=2),
        nn.Conv2d(4, 4, 3, groups=2, padding=1),
        nn.Conv2d(4, 2, (1, 3)),
    ]
    model = nn.Sequential(*(m for c in convolutions for m in (c, nn.Tanh())), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(3, 2, 13, 15).double()
    model(x)
    posterior = pg.DiagonalPosterior({n: torch.rand_like(p) for n, p in model.named_parameters()})
    net = pg.linearise(model.eval(), posterior, x)
    assert tiled(net) == 1
    torch.testing.assert_close(net(x).covariance, GLM(model, posterior)(x).covariance)
