"""Sensitivities through convolutions by tiles: equal to the adjoint, and taken where they pay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import propagauss as pg
from propagauss.baselines import GLM
from propagauss.passes.backwards.shortcuts import images
from propagauss.rules.adjoints.images import convolution
from propagauss.rules.adjoints.tiled_adjoint import TiledAdjoint, tiled_adjoint_pays


@pytest.mark.parametrize(
    ("sizes", "padding"), [((8, 8), (1, 1)), ((7, 5), (0, 2)), ((3, 10), (1, 3))], ids=["even", "odd", "wide"]
)
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equal_to_the_adjoint(
    sizes: tuple[int, ...], padding: tuple[int, ...], kind: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, *sizes).double(), torch.randn(5, 4, 3, 3).double()
    y = F.conv2d(x, w, padding=padding)  # type: ignore[arg-type]
    g = torch.randn(3, *y.shape).double()
    truth = convolution(g, 0, y, x, w, None, 1, padding)
    form = TiledAdjoint(w.to(kind), sizes, tuple(y.shape[2:]), padding)
    found = form(g.to(kind)).double()
    torch.testing.assert_close(found, truth, rtol=0, atol=tolerance * float(truth.abs().amax()))
    assert form(g[:, :0].to(kind)).shape == truth[:, :0].shape


def test_the_choice_goes_by_count() -> None:
    assert tiled_adjoint_pays(10, (8, 8), (8, 8), 256, 256)  # the third stage of a ResNet for 32 pixels
    assert not tiled_adjoint_pays(1, (8, 8), (8, 8), 256, 256)
    assert not tiled_adjoint_pays(10, (32, 32), (32, 32), 64, 64)
    assert not tiled_adjoint_pays(100, (8, 8), (8, 8), 512, 512)


def test_in_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "tiled_adjoint_pays", lambda *_: True)
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 3, 3, padding=(0, 2))]
    model = nn.Sequential(*(m for c in convolutions for m in (c, nn.Tanh())), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(3, 2, 7, 8).double()
    model(x)
    posterior = pg.DiagonalPosterior({n: torch.rand_like(p) for n, p in model.named_parameters()})
    net = pg.linearise(model.eval(), posterior, x)
    assert (
        sum(isinstance(m, TiledAdjoint) for m in net.modules()) == 1
    )  # not of the first layer, nor of that with groups
    torch.testing.assert_close(net(x).covariance, GLM(model, posterior)(x).covariance)
