"""Forms of convolutions that are chosen when the backward walk is finished, all in one exported file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import propagauss as pg
from both_files import both_files
from propagauss.baselines import GLM
from propagauss.passes.backwards.shortcuts import images
from propagauss.predict.models.loading import load
from propagauss.rules.adjoints.positions import AveragedLayer
from propagauss.rules.adjoints.shifts import ShiftedPairs
from propagauss.rules.adjoints.tiled_adjoint import TiledAdjoint
from propagauss.rules.adjoints.tiles import TiledConvolution


def test_exported_with_an_open_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "LARGE", 0)
    monkeypatch.setattr(images, "tiled_adjoint_pays", lambda *_: True)
    torch.manual_seed(0)
    large = [nn.Conv2d(1, 64, 3), nn.Tanh(), nn.Conv2d(64, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2)]
    small = [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*large, *small, nn.Flatten(), nn.Linear(3, 4)).eval()
    x = torch.randn(3, 1, 30, 32)
    posterior = pg.DiagonalPosterior({n: torch.rand_like(p) for n, p in model.named_parameters()})
    net = pg.linearise(model, posterior, x[:2], covariance="diagonal")
    assert {AveragedLayer, ShiftedPairs, TiledAdjoint, TiledConvolution} <= {type(m) for m in net.modules()}
    torch.testing.assert_close(net(x).variance, GLM(model, posterior)(x).variance, rtol=1e-4, atol=0)
    for path in both_files(pg.Regressor(net, noise=0.1), tmp_path).values():
        written = load(path)
        assert written.batch is None
        found = torch.as_tensor(written(x.numpy())["variance"])
        torch.testing.assert_close(found, net(x).variance + 0.1**2, rtol=1e-4, atol=0)
