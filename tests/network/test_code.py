"""Generated code reads buffers and modules directly, whatever happens to them later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import propagauss as pg


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def built(make: Callable[..., Any], model: nn.Module, variance: float = 0.1) -> Any:
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in model.named_parameters()})
    return make(model, posterior, torch.zeros(2, 3))


@pytest.mark.parametrize("make", [pg.streamline, pg.linearise])
def test_moves_copies_and_new_values_are_seen(make: Callable[..., Any], model: nn.Module) -> None:
    net, x = built(make, model), torch.randn(3, 3)
    assert "self._buffers['" in net.code or "self._modules['" in net.code
    found = net(x).variance
    wide = copy.deepcopy(net).double()
    assert wide(x.double()).variance.dtype == torch.float64
    torch.testing.assert_close(wide(x.double()).variance, found.double())
    twice = built(make, model, 0.2).state_dict()
    for assign in (False, True):
        other = copy.deepcopy(net)
        other.load_state_dict(twice, assign=assign)
        torch.testing.assert_close(other(x).variance, built(make, model, 0.2)(x).variance)
    torch.testing.assert_close(net(x).variance, found)
