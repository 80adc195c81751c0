"""Small ReLU networks, trained to the maximum a posteriori."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.demo.data import Split
from propagauss.likelihoods.links import categorical
from propagauss.posteriors import fit_laplace
from propagauss.predictive.metrics import nlpd

LEARNING_RATE, BATCH = 1e-2, 64


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """`Linear(sizes[0], sizes[1])`, ReLU, ..., `Linear(sizes[-2], sizes[-1])`"""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(
    split: Split,
    sizes: Sequence[int],
    likelihood: Literal["classification", "regression"],
    epochs: int,
    seed: int,
    prior_precision: float | None = None,
    rounds: int = 4,
) -> nn.Sequential:
    """A network at the minimum of `Σ -log p(y | x, w) + δ/2 ‖w‖²`.

    `δ` is given, or found: training then takes `rounds` turns, and after each `δ` and the noise of a regression are set
    to those of largest marginal likelihood (of the Kronecker posterior).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mlp(sizes)
        precision, noise = prior_precision or 1.0, 1.0
        for _ in range(rounds if prior_precision is None else 1):
            _descend(model, split.train, likelihood, precision, noise, epochs)
            if prior_precision is None:
                found = fit_laplace(model, split.train_loader, likelihood, "kronecker", progress=False).details
                precision, noise = found["prior_precision"], found.get("noise", 1.0)
    return model.eval()


def train_classifier(
    split: Split, sizes: Sequence[int], epochs: int, seed: int, priors: Sequence[float]
) -> tuple[nn.Sequential, dict[float, float]]:
    """The network of the prior precision with the least validation NLPD, and that NLPD for each of `priors`.

    The plain model decides, so that no way of predicting is favoured but the one without a posterior.
    """
    models = {prior: train(split, sizes, "classification", epochs, seed, prior) for prior in priors}
    x, y = split.validation
    with torch.no_grad():
        found = {prior: nlpd(categorical(model(x)), y) for prior, model in models.items()}
    return models[min(found, key=lambda prior: found[prior])], found


def _descend(
    model: nn.Module, data: tuple[Tensor, Tensor], likelihood: str, precision: float, noise: float, epochs: int
) -> None:
    x, y = data
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
