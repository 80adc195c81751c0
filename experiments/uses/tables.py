"""Uses with numbers as inputs: the tutorial's points, diabetes, and noise that differs from input to input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.frame.experiment import Context
from experiments.uses.use import Kind, Use, pairs, parts, trained
from propagauss.demo.data import diabetes as diabetes_data


def points(context: Context, seed: int) -> Use:
    """The tutorial's: two classes in the plane, by the sign of the product of both coordinates."""
    x = torch.randn(128 + 500 + 1000, 2)
    y = (x.prod(dim=1) + 0.3 * torch.randn(len(x)) > 0).long()
    train, validation, test = parts(x, y, 128, 500, 1000)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    trained(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), pairs(x[:128], y[:128], 64), 200, 1e-2)
    angle = 2 * torch.pi * torch.rand(1000, 1)
    far = 8 * torch.cat([angle.cos(), angle.sin()], 1)
    return Use(model, "classification", train, validation, test, [far])


def diabetes(context: Context, seed: int) -> Use:
    split = diabetes_data(seed)
    model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
    steps = 20 if context.quick else 200
    trained(model, lambda batch: F.mse_loss(model(batch[0]), batch[1]), pairs(*split.train, 64), steps, decay=1e-2)
    x = split.test[0]
    far = x + 5 * torch.randn_like(x).sign()
    return Use(model, "regression", split.train_loader, split.validation_loader, pairs(*split.test), [far])


class Heads(nn.Module):
    """Mean and log variance as a pair, `[B, 1]` each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mean, self.log_variance = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.mean(h), self.log_variance(h)


def heteroscedastic(context: Context, seed: int) -> Use:
    """A wave whose noise grows to the right."""
    x = 4 * torch.rand(300 + 500 + 1000, 1) - 2
    y = (2 * x).sin() + (0.05 + 0.15 * (x + 2)) * torch.randn_like(x)
    train, validation, test = parts(x, y, 300, 500, 1000)
    model = Heads()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        mean, log_variance = model(batch[0])
        return F.gaussian_nll_loss(mean, batch[1], log_variance.exp())

    trained(model, loss, pairs(x[:300], y[:300], 64), 600, decay=1e-2)
    far = (3 + 3 * torch.rand(1000, 1)) * torch.randn(1000, 1).sign()
    return Use(model, "heteroscedastic", train, validation, test, [far])


POINTS = Kind("the tutorial's points", "a circle of radius 8", points)
DIABETES = Kind("diabetes", "each input moved by 5 standard deviations", diabetes)
HETEROSCEDASTIC = Kind("noise that varies", "3 to 6, where training inputs are within 2", heteroscedastic)
