"""Small ReLU networks, trained to the maximum a posteriori under a prior that the marginal likelihood chooses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.experiments.data import Split
from propagauss.posterior import fit_laplace

LEARNING_RATE, BATCH = 1e-2, 64


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """`Linear(sizes[0], sizes[1])`, ReLU, ..., `Linear(sizes[-2], sizes[-1])`"""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(split: Split, sizes: Sequence[int], likelihood: str, rounds: int, epochs: int, seed: int) -> nn.Sequential:
    """A network at the minimum of `Σ -log p(y | x, w) + δ/2 ‖w‖²`.

    After each round of training, `δ` (and the noise of a regression) are set to those of largest marginal likelihood,
    so that the posterior is expanded around the maximum of what it approximates: a Laplace approximation at weights
    that were trained without a prior is far too wide.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(sizes)
        precision, noise = 1.0, 1.0
        for _ in range(rounds):
            _descend(model, split.train, likelihood, precision, noise, epochs)
            fitted = fit_laplace(
                model.eval(), split.train_loader, likelihood=likelihood, structure="kronecker", progress=False
            )  # type: ignore[arg-type]
            precision, noise = fitted.details["prior_precision"], fitted.details.get("noise", 1.0)
    return model.eval()


def _descend(
    model: nn.Module, data: tuple[Tensor, Tensor], likelihood: str, precision: float, noise: float, epochs: int
) -> None:
    x, y = data
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            if likelihood == "classification":
                loss = F.cross_entropy(model(x[rows]), y[rows])
            else:
                loss = F.mse_loss(model(x[rows]), y[rows]) / (2 * noise**2)
            prior = sum(p.square().sum() for p in model.parameters())
            (loss + precision / (2 * len(x)) * prior).backward()
            optimiser.step()
        schedule.step()
