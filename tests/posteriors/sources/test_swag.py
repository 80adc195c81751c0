"""SWAG: weights collected during training become a posterior."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import propagauss as pg


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def collected(count: int = 12) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A network that is trained with large steps, its average, and the weights that it passed through."""
    model = network()
    average, snapshots = AveragedModel(model), []
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.randint(2, (30,))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(count):
        optimiser.zero_grad()
        some = torch.randint(30, (8,))
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimiser.step()
        average.update_parameters(model)
        snapshots.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return average.module.eval(), snapshots


def flat(snapshot: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in snapshot.values()])


@pytest.mark.parametrize("rank", [2, 5, 20])
def test_equals_the_formula(rank: int) -> None:
    model, snapshots = collected()
    posterior = pg.from_swag(snapshots, model, rank)
    assert isinstance(posterior, pg.LowRankPosterior)
    weights = torch.stack([flat(s) for s in snapshots])
    deviations = (weights - weights.mean(0))[-rank:]
    expected = weights.var(0, correction=0).diag() + deviations.mT @ deviations / (len(deviations) - 1)
    torch.testing.assert_close(posterior.to_dense(), expected / 2)
    assert posterior.rank == len(deviations) == min(rank, 12)
    assert posterior.details == {"snapshots": 12}


def test_variances_only() -> None:
    model, snapshots = collected()
    posterior = pg.from_swag(iter(snapshots), model, rank=0)
    assert isinstance(posterior, pg.DiagonalPosterior)
    weights = torch.stack([flat(s) for s in snapshots])
    torch.testing.assert_close(posterior.to_dense().diagonal(), weights.var(0, correction=0))


def test_prediction_agrees_with_samples() -> None:
    model, snapshots = collected()
    posterior = pg.from_swag(snapshots, model, rank=4).scale(0.01)
    x = torch.randn(5, 3, dtype=torch.float64)
    found = pg.streamline(model, posterior, x, covariance="full")(x)
    glm = pg.baselines.GLM(model, posterior)(x)
    torch.testing.assert_close(found.mean, model(x))
    # what all layers share of a direction is lost between them, so this is close, not equal
    last = posterior.select("2.*")
    exact = pg.streamline(model, last, x, covariance="full")(x).covariance
    torch.testing.assert_close(exact, pg.baselines.GLM(model, last)(x).covariance)
    assert 0.3 < (found.variance / glm.variance).median() < 3


def test_entries_that_are_no_parameters_and_parameters_that_stay() -> None:
    model, snapshots = collected()
    model.get_submodule("0").register_buffer("more", torch.ones(2))
    kept = dict(model.named_parameters())["2.bias"].detach()
    with_buffers = [s | {"0.more": torch.ones(2), "2.bias": kept} for s in snapshots]
    assert pg.from_swag(with_buffers, model).names == ("0.weight", "0.bias", "2.weight")


def test_refuses() -> None:
    model, snapshots = collected()
    with pytest.raises(pg.PosteriorError, match="rank is 1"):
        pg.from_swag(snapshots, model, rank=1)
    with pytest.raises(pg.PosteriorError, match=r"at least two snapshots.*got 1"):
        pg.from_swag(snapshots[:1], model)
    with pytest.raises(pg.PosteriorError, match=r"snapshot 0 has no '0\.weight' of shape \(4, 3\)"):
        pg.from_swag([{"module.0.weight": torch.ones(4, 3)}], model)
    with pytest.raises(pg.PosteriorError, match="all the same: clone"):
        pg.from_swag([snapshots[0]] * 3, model)
    with pytest.raises(pg.PosteriorError, match=r"'0\.weight' of the model is not the mean of the snapshots"):
        pg.from_swag(snapshots, network())
    with pytest.raises(pg.PosteriorError, match=r"'2\.bias' has values that are not finite in snapshot 12"):
        pg.from_swag([*snapshots, snapshots[0] | {"2.bias": torch.full((2,), torch.nan)}], model)
