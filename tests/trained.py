"""Diagonal standard deviations of small trained networks beside exact ones, and the same networks untrained.

    .venv/bin/python tests/trained.py                                  # print the table
    .venv/bin/python tests/trained.py --write docs/compatibility.md    # put it between the markers of the page

Every network is trained on scikit-learn's digits and gets a diagonal Laplace posterior over all its parameters, shrunk
so far that linearisation is exact. The truth is then `diag(J Σ Jᵀ)`, with the Jacobian of the whole network.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from propagauss.demo import data
from propagauss.demo.training import mlp

SIDE, CLASSES = 8, 10
INPUTS = 100  # of the test part
SHRINK = 1e-8  # of the posterior's variances
SEEDS = (0, 1, 2)  # of weights, order of training and split of the data
Covariance = Literal["diagonal", "full"]

# -- networks: from [B, 64] pixels to [B, 10] logits


class Convolutions(nn.Sequential):
    """Two convolutions, average pooling over all places."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, SIDE, SIDE)),
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
        )


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.branch(x))


class Residual(nn.Sequential):
    """A stem and two residual blocks with batch normalisation, average pooling over all places."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__(
            nn.Unflatten(1, (1, SIDE, SIDE)),
            *(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(ResidualBlock(channels), ResidualBlock(channels)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)),
        )


class Patches(nn.Module):
    """`[B, 64] -> [B, 16, width]`: patches of 2 x 2 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x.reshape(-1, 1, SIDE, SIDE)).flatten(2).mT


class AttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.projections, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.projections(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class VisionTransformer(nn.Module):
    """Two blocks over 16 patches and a class token."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(AttentionBlock(width, heads), AttentionBlock(width, heads))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x)
        tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], 1) + self.places
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class MixerBlock(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).mT).mT
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    """Two blocks over 16 patches, the mean over patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.blocks = nn.Sequential(MixerBlock(width, 16), MixerBlock(width, 16))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(x))).mean(1))


class Recurrent(nn.Module):
    """A GRU over the rows of the image, its last state to the head."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.rows, self.head = nn.GRU(SIDE, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x.unflatten(1, (SIDE, SIDE)))[0][:, -1])


def _mlp() -> nn.Module:
    return mlp((SIDE * SIDE, 32, 32, CLASSES))


# name, network, and the structures in which it is tried; a full covariance needs the square of a layer's entries
NETWORKS: list[tuple[str, Callable[[], nn.Module], tuple[Covariance, ...]]] = [
    ("MLP", _mlp, ("diagonal", "full")),
    ("CNN, average pooling", Convolutions, ("diagonal",)),
    ("residual CNN, batch norm, average pooling", Residual, ("diagonal",)),
    ("ViT", VisionTransformer, ("diagonal",)),
    ("MLP-Mixer", Mixer, ("diagonal",)),
    ("GRU over rows", Recurrent, ("diagonal", "full")),
]

# -- what is measured


class Agreement(NamedTuple):
    """Of streamlined standard deviations with exact ones: their size, and which inputs are the uncertain ones."""

    ratio: float
    ranks: float


def agreement(model: nn.Module, posterior: pg.Posterior, x: Tensor, covariance: Covariance) -> Agreement:
    """Ratio of root mean squares over inputs and outputs; Spearman's correlation over inputs, of means over outputs."""
    net = pg.streamline(model, posterior, x[:2], covariance=covariance)
    with torch.no_grad():
        ours = torch.cat([net(part).variance for part in x.split(20)])
        exact = pg.baselines.GLM(model, posterior, "diagonal")(x).variance
    ratio = float((ours.mean() / exact.mean()).sqrt())
    ranks = float(spearmanr(ours.sqrt().mean(1), exact.sqrt().mean(1)).statistic)
    return Agreement(ratio, ranks)


def trained(model: nn.Module, split: data.Split, epochs: int = 150) -> nn.Module:
    """By AdamW, from the weights that it has."""
    x, y = split.train
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
        schedule.step()
    return model.eval()


def measured(make: Callable[[], nn.Module], structures: tuple[Covariance, ...], seed: int) -> list[tuple[float, ...]]:
    """For each structure: accuracy, then ratio and rank correlation of the untrained and of the trained network."""
    split = data.digits(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        untrained = make().eval()
        model = trained(copy.deepcopy(untrained), split)
    posterior = pg.fit_laplace(model, split.train_loader, structure="diagonal", progress=False)
    posterior = posterior.to(torch.float64).scale(SHRINK)
    x, y = split.test
    accuracy = float((model(x).argmax(-1) == y).double().mean())
    x, networks = x[:INPUTS].double(), (untrained.double(), model.double())
    return [(accuracy, *(n for m in networks for n in agreement(m, posterior, x, c))) for c in structures]


def rows(name: str, make: Callable[[], nn.Module], structures: tuple[Covariance, ...]) -> list[tuple[str, ...]]:
    """The lines of the table for one network."""
    size = sum(p.numel() for p in make().parameters())
    seeds = [measured(make, structures, seed) for seed in SEEDS]
    found = []
    for covariance, *runs in zip(structures, *seeds, strict=True):
        numbers = [span(values) for values in zip(*runs, strict=True)]
        found.append((name, f"{size:,}", numbers[0], covariance, *numbers[1:]))
    return found


def span(values: Sequence[float]) -> str:
    """The smallest and the largest."""
    low, high = (f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


HEADER = ("network", "parameters", "accuracy", "covariance")
HEADER += ("sd ratio, untrained", "rank correlation, untrained", "sd ratio, trained", "rank correlation, trained")
START, END = "<!-- trained:start -->", "<!-- trained:end -->"


def table() -> str:
    lines = [HEADER, ("---",) * 4 + ("--:",) * 4]
    for network in NETWORKS:
        start = time.perf_counter()
        lines += rows(*network)
        print(f"{network[0]}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page that holds the markers of the table")
    page = parser.parse_args().write
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "There is a performance drop|torch.vmap cannot run")
    text = table()
    if page is None:
        print(text)
        return
    before, rest = page.read_text().split(START)
    page.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
