"""Diagonal results agree with the paper authors' own library, where that library is right (ReLU MLPs)."""

import importlib.util
import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import propagauss as pg

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(importlib.util.find_spec("suq") is None, reason="suq is not installed"),
]


@pytest.fixture
def suq_mlp(monkeypatch: pytest.MonkeyPatch) -> type:
    """`SUQ_MLP_Diag`. The published suq 0.1.0 lacks its own `suq.utils` package, so `import suq` fails; the one name
    that it takes from there (`torch_dataset`, for its scale fit) is not needed here, so a stub will do."""
    utils, inner = ModuleType("suq.utils"), ModuleType("suq.utils.utils")
    inner.torch_dataset = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "suq.utils", utils)
    monkeypatch.setitem(sys.modules, "suq.utils.utils", inner)
    from suq.diag_suq_mlp import SUQ_MLP_Diag

    return SUQ_MLP_Diag


@pytest.mark.parametrize("widths", [(3, 2), (3, 5, 2), (4, 6, 5, 3)], ids=str)
@pytest.mark.parametrize("uncertain", [False, True], ids=["fixed input", "uncertain input"])
def test_agrees_with_suq(suq_mlp: type, widths: tuple[int, ...], uncertain: bool) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    variances = {n: 0.01 + 0.1 * torch.rand_like(p) for n, p in model.named_parameters()}
    x, v = torch.randn(7, widths[0]), torch.rand(7, widths[0])

    # the variances of each layer's weight (row by row) and bias, one layer after another
    theirs = suq_mlp(model, torch.cat([t.flatten() for t in variances.values()]), "classification")
    mean, variance = theirs.forward_latent(x, v if uncertain else None)

    given = pg.Gaussian(x, v) if uncertain else x
    ours = pg.streamline(model, pg.DiagonalPosterior(variances), given)(given)
    torch.testing.assert_close(ours.mean, mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.variance, variance.detach(), rtol=1e-5, atol=1e-5)
