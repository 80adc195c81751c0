"""Parameters without dimensions, and low-rank posteriors without directions."""

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg


class Scaled(nn.Module):
    """A linear layer times one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.gain = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def jacobian(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    means = {n: p.detach() for n, p in model.named_parameters()}
    return torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(means)


def directions(model: nn.Module, count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    return {n: 1e-4 * torch.randn((count, *s), generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def posteriors(model: nn.Module) -> dict[str, pg.Posterior]:
    variances = {n: torch.full_like(p, 1e-8) for n, p in model.named_parameters()}
    size = sum(p.numel() for p in model.parameters())
    return {
        "diagonal": pg.DiagonalPosterior(variances),
        "low-rank": pg.LowRankPosterior(variances, directions(model, 2)),
        "rank 0": pg.LowRankPosterior(variances, directions(model, 0)),
        "full": pg.FullPosterior(list(variances), 1e-8 * torch.eye(size, dtype=torch.float64)),
    }


@pytest.mark.parametrize("kind", ["diagonal", "low-rank", "rank 0", "full"])
def test_quadratic_and_streamline_take_a_single_number(kind: str) -> None:
    model = Scaled().eval()
    posterior = posteriors(model)[kind].bind(dict(model.named_parameters()))
    x = torch.randn(5, 4, dtype=torch.float64)
    j = jacobian(model, x)
    flat = torch.cat([j[n].reshape(5, 3, -1) for n in posterior.names], dim=-1)
    expected = flat @ posterior.to_dense() @ flat.mT
    torch.testing.assert_close(posterior.quadratic(j), expected)
    assert posterior.sample(2)["gain"].shape == (2,)
    if kind != "low-rank":  # whose directions join the layer and the gain, which are taken as independent
        g = pg.streamline(model, posterior, x, covariance="full")(x)
        torch.testing.assert_close(g.covariance, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_fit_takes_a_single_number(structure: str) -> None:
    model = Scaled().eval()
    data = [(torch.randn(20, 4, dtype=torch.float64), torch.randint(0, 3, (20,)))]
    assert "gain" in pg.fit_laplace(model, data, structure=structure).names


def test_convolution_with_a_low_rank_posterior_without_directions() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).double().eval()
    variances = {n: torch.full_like(p, 1e-3) for n, p in model.named_parameters()}
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    for covariance in ("diagonal", "full"):
        found = [
            pg.streamline(model, posterior, x, covariance=covariance)(x).variance
            for posterior in (pg.DiagonalPosterior(variances), pg.LowRankPosterior(variances, directions(model, 0)))
        ]
        torch.testing.assert_close(found[0], found[1])
