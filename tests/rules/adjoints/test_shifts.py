"""Convolutions by pairs of positions, shift by shift: equal to pairs of patches, and taken where padding is much."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import propagauss as pg
from propagauss.baselines import GLM
from propagauss.passes.backwards.shortcuts import images
from propagauss.rules.adjoints.forms import Independent
from propagauss.rules.adjoints.positions import SharedLayer
from propagauss.rules.adjoints.shifts import Geometry, ShiftedPairs

GEOMETRIES = {
    "padded": Geometry((4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    "uneven": Geometry((3, 5), (2, 3), (2, 1), (1, 2), (2, 1)),
    "out of reach": Geometry((1, 2), (3, 3), (1, 1), (2, 2), (1, 2)),
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_equal_to_patches(name: str, full: bool) -> None:
    torch.manual_seed(0)
    geometry = GEOMETRIES[name]
    x, entries = torch.randn(2, 4, *geometry.sizes).double(), 4 * geometry.kernel[0] * geometry.kernel[1]
    layer = Independent(torch.rand(5, entries).double(), torch.rand(5).double(), None)
    g = torch.randn(3, 2, 5, *geometry.places).double()
    patches = F.unfold(x, geometry.kernel, geometry.dilation, geometry.padding, geometry.stride)  # type: ignore[arg-type]
    truth = SharedLayer(layer, full, patches.shape[2])(g.flatten(3), patches, total := torch.rand(()).double())
    torch.testing.assert_close(ShiftedPairs(layer, full, geometry)(g, x, total), truth)


def test_the_choice_goes_by_count() -> None:
    assert GEOMETRIES["padded"].worth_shifting()  # the last stage of a ResNet for 32 pixels
    assert not Geometry((4, 4), (3, 3), (1, 1), (0, 0), (1, 1)).worth_shifting()
    assert not Geometry((8, 8), (3, 3), (2, 2), (1, 1), (1, 1)).worth_shifting()


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_in_a_network(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "LARGE", 0)
    torch.manual_seed(0)
    model = nn.Sequential(kind(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4)).double()
    x = torch.randn(3, 2, *[3] * (1 if kind is nn.Conv1d else 2)).double()
    model(x)
    posterior = pg.DiagonalPosterior({n: torch.rand_like(p) for n, p in model.named_parameters()})
    net = pg.linearise(model.eval(), posterior, x)
    assert any(isinstance(m, ShiftedPairs) for m in net.modules()) == (kind is nn.Conv2d)
    torch.testing.assert_close(net(x).covariance, GLM(model, posterior)(x).covariance)
