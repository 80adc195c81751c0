"""The first picture: a network that was trained on two stretches of a line, asked about all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.engines.linearise import linearise
from propagauss.posteriors import fit_laplace
from propagauss.predictive.regressor import Regressor

NOISE, REACH = 0.15, 6.0
TRAIN, TEST, WIDTH = 120, 1000, 32


@dataclass(frozen=True)
class Opening:
    """Training data, and what the plain model and its linearised predictive say on a grid and on new data."""

    train: tuple[Tensor, Tensor]
    grid: Tensor
    mean: Tensor
    plain: Tensor  # standard deviation of the plain model: the noise, which it takes to be the same everywhere
    stddev: Tensor  # that of the linearised predictive
    noise: float
    inside: float  # share of new observations, from where the data are, within 1.96 standard deviations

    @property
    def multiples(self) -> dict[str, float]:
        """Standard deviations between and away from the data, as multiples of the noise."""
        at = {"between": 0.0, "away": REACH}
        return {name: float(self.stddev[(self.grid[:, 0] - x).abs().argmin()] / self.noise) for name, x in at.items()}


def observe(count: int) -> tuple[Tensor, Tensor]:
    """A sine with noise, seen from -3 to -1.5 and from 1 to 2.5."""
    x = 3 * torch.rand(count, 1)
    x = torch.where(x < 1.5, x - 3, x - 0.5)
    return x, torch.sin(1.5 * x) + NOISE * torch.randn(count, 1)


def compute(seed: int, steps: int) -> Opening:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        train, (x, y) = observe(TRAIN), observe(TEST)
        model = nn.Sequential(
            *(nn.Linear(1, WIDTH), nn.Tanh()), *(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1)
        )
        optimiser = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(steps):
            optimiser.zero_grad()
            F.mse_loss(model(train[0]), train[1]).backward()
            optimiser.step()
    model.eval()
    posterior = fit_laplace(model, [train], "regression", "full", progress=False)
    regressor = Regressor(linearise(model, posterior, train[0][:2]))
    grid = torch.linspace(-REACH, REACH, 301)[:, None]
    with torch.no_grad():
        found, new = regressor(grid), regressor(x)
    inside = ((y - new.mean).abs() < 1.96 * new.stddev).double().mean().item()
    noise = float(posterior.details["noise"])
    return Opening(train, grid, found.mean, torch.full_like(found.stddev, noise), found.stddev, noise, inside)
