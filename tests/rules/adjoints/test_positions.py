"""Forms of weights that positions share: both against the Jacobian written out, and the choice between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from propagauss.baselines import GLM
from propagauss.rules.adjoints import positions
from propagauss.rules.adjoints.forms import Independent
from propagauss.rules.adjoints.positions import SharedLayer, Sizes

K, B, O, I = 3, 2, 5, 4


def literal(g: Tensor, a: Tensor, variance: Tensor, bias: Tensor) -> Tensor:
    """`Σ_oi V_oi M_koi M_loi + Σ_o v_o (Σ_t g_kto)(Σ_t g_lto)`, by loops."""
    found = torch.zeros(B, K, K, dtype=g.dtype)
    for b in range(B):
        jacobians = [sum(torch.outer(g[k, b, :, t], a[b, :, t]) for t in range(a.shape[2])) for k in range(K)]
        shifts = [g[k, b].sum(1) for k in range(K)]
        for k in range(K):
            for l in range(K):
                own = (variance * jacobians[k] * jacobians[l]).sum()
                found[b, k, l] = own + (bias * shifts[k] * shifts[l]).sum()
    return found


@pytest.mark.parametrize("block", [1, 10**6])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_against_loops(count: int, full: bool, pairs: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(positions, "LONG_PRODUCTS", block)
    torch.manual_seed(0)
    g, a = torch.randn(K, B, O, count).double(), torch.randn(B, I, count).double()
    variance, bias = torch.rand(O, I).double(), torch.rand(O).double()
    truth = literal(g, a, variance, bias)
    total = torch.rand_like(truth) if full else torch.rand(B, K).double()
    found = SharedLayer(Independent(variance, bias, None), full, pairs * count)(g, a, total) - total
    torch.testing.assert_close(found, truth if full else truth.diagonal(dim1=1, dim2=2))


def test_in_a_rotated_basis() -> None:
    torch.manual_seed(0)
    g, a = torch.randn(K, B, O, 3).double(), torch.randn(B, I, 3).double()
    left, right = (torch.linalg.qr(torch.randn(n, n).double())[0] for n in (O, I))
    variance, bias = torch.rand(O, I).double(), torch.rand(O).double()
    truth = literal(left.mT @ g, right.mT @ a, variance, bias)
    for pairs in (0, 3):
        form = SharedLayer(Independent(variance, bias, (left, right)), True, pairs)
        for make in (lambda t: t, lambda t: t.mT.contiguous().mT):  # images and tokens
            torch.testing.assert_close(form(make(g), make(a)), truth)


def test_the_choice_goes_by_count() -> None:
    assert Sizes(10, 16, 512, 4608).by_pairs(full=False)
    assert not Sizes(10, 1024, 64, 576).by_pairs(full=False)
    assert not Sizes(1, 197, 768, 768).by_pairs(full=True)
    assert not Sizes(10, None, 8, 8).by_pairs(full=True)
    assert Sizes(10, 4, 64, 64).rotates_first()
    assert not Sizes(1, 12544, 64, 576).rotates_first()


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
@pytest.mark.parametrize("side", [3, 12])  # few positions, many positions
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Conv2d(2, 3, 2, dilation=2, bias=False)])
def test_convolutions_by_either_form(layer: nn.Module, side: int, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)).double().eval()
    x = torch.randn(3, 2, side, side).double()
    data = [(x, torch.tensor([0, 1, 1]))]
    posterior = pg.fit_laplace(model, data, structure=kind, prior_precision=1.0)  # type: ignore[arg-type]
    truth = GLM(model, posterior)(x)
    torch.testing.assert_close(pg.linearise(model, posterior, x)(x).covariance, truth.covariance)
    variances = pg.linearise(model, posterior, x, covariance="diagonal")(x).variance
    torch.testing.assert_close(variances, truth.variance)
