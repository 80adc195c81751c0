"""Layers behind an average over positions: one Jacobian for all outputs, and the same numbers."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from propagauss.baselines import GLM
from propagauss.rules.adjoints.positions import AveragedLayer


class Averaged(nn.Module):
    """The end of a ResNet: a convolution, normalisation, a sum with what came before, and an average."""

    def __init__(self, average: str):
        super().__init__()
        self.average = average
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(12 if average == "quarters" else 3, 4)
        self.norm.running_var = torch.tensor([0.5, 1.5, 2.5])
        self.pool = nn.AdaptiveAvgPool2d(2 if average == "quarters" else 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = torch.relu(self.norm(self.second(y)) + y)
        if self.average == "mean":
            return self.head(y.mean((2, 3)))
        return self.head(self.pool(y).flatten(1))


@pytest.mark.parametrize(("average", "count"), [("whole", 1), ("mean", 1), ("quarters", 0)])
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_equal_to_the_jacobian(average: str, count: int, covariance: Literal["full", "diagonal"]) -> None:
    torch.manual_seed(0)
    model = Averaged(average).double().eval()
    posterior = pg.DiagonalPosterior({n: torch.rand_like(p) for n, p in model.named_parameters()})
    x = torch.randn(3, 2, 6, 6).double()
    net = pg.linearise(model, posterior, x, covariance=covariance)
    assert sum(isinstance(m, AveragedLayer) for m in net.modules()) == count
    truth, found = GLM(model, posterior)(x), net(x)
    torch.testing.assert_close(found.variance, truth.variance)
    if covariance == "full":
        torch.testing.assert_close(found.covariance, truth.covariance)
