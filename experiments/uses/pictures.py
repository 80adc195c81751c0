"""Uses with pictures as inputs: digits, clothes, several digits at once, a class for each pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets import images
from experiments.frame.experiment import Context
from experiments.uses.use import Kind, Use, pairs, parts, trained
from propagauss.demo.data import digits as digits_data


def _mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, outputs))


def _shuffled(x: Tensor) -> Tensor:
    """The pixels of each picture in another order, one for all."""
    return x[:, torch.randperm(x.shape[1])]


def digits(context: Context, seed: int) -> Use:
    split = digits_data(seed)
    model = _mlp(10)
    trained(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), pairs(*split.train, 64), 300)
    far = [_shuffled(split.test[0])]
    return Use(model, "classification", split.train_loader, split.validation_loader, pairs(*split.test), far)


def clothes(context: Context, seed: int) -> Use:
    """A small convolutional network on Fashion-MNIST; far: handwritten digits."""
    sizes = (3000, 1000, 2000)
    data = images(context, "fashion_mnist")
    chosen = []
    for (x, y), size in zip((data.train, data.validation, data.test), sizes, strict=True):
        rows = torch.randperm(len(y))[:size]
        chosen.append((x[rows], y[rows]))
    first, second = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
    head = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *head)
    batches = pairs(*chosen[0], size=64)
    trained(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batches, 600)
    far = images(context, "mnist").test[0][: sizes[2]]
    train, validation, test = (pairs(*part) for part in chosen)
    return Use(model, "classification", train, validation, test, list(far.split(128)))


def several(context: Context, seed: int) -> Use:
    """Two digits on top of each other, and which of the ten are there."""
    split = digits_data(seed)

    def mixed(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
        one, other = torch.randint(len(x), (2, count))
        return torch.maximum(x[one], x[other]), F.one_hot(y[one], 10) | F.one_hot(y[other], 10)

    groups = zip((split.train, split.validation, split.test), (2000, 600, 1000), strict=True)
    chosen = [mixed(x, y, count) for (x, y), count in groups]
    model = _mlp(10)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1].float())

    trained(model, loss, pairs(*chosen[0], 64), 600)
    train, validation, test = (pairs(*part) for part in chosen)
    return Use(model, "binary", train, validation, test, [_shuffled(chosen[2][0])])


# -- a class for each pixel

SIDE = {"full": 16, "quick": 7}
IGNORED = -100


def scenes(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Pictures `[N, 1, S, S]` of a disc and a square in noise; labels `[N, S, S]`, none at the edges of shapes."""
    grid = torch.arange(side, dtype=torch.float32)
    down, right = torch.meshgrid(grid, grid, indexing="ij")
    at, size = 3 + (side - 6) * torch.rand(2, 2, count, 1, 1), 2 + 2 * torch.rand(2, count, 1, 1)
    disc = ((down - at[0, 0]).square() + (right - at[0, 1]).square()).sqrt() - size[0]  # distance from its edge
    square = torch.maximum((down - at[1, 0]).abs(), (right - at[1, 1]).abs()) - size[1]
    labels = torch.zeros(count, side, side, dtype=torch.long)
    labels[disc < 0] = 1
    labels[square < 0] = 2
    x = torch.where(labels == 0, 0.0, torch.where(labels == 1, 1.0, 0.7)) + 0.5 * torch.randn(labels.shape)
    labels[(disc.abs() < 0.3) | (square.abs() < 0.3)] = IGNORED
    return x.unsqueeze(1), labels


def segmentation(context: Context, seed: int) -> Use:
    sizes, side = (16, 16, 16) if context.quick else (300, 150, 300), SIDE[context.mode]
    x, y = scenes(sum(sizes), side)
    train, validation, test = parts(x, y, *sizes)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORED)

    trained(model, loss, pairs(x[: sizes[0]], y[: sizes[0]], 32), 30 if context.quick else 400, 1e-2)
    far = -2 * scenes(sizes[2], side)[0]
    return Use(model, "classification", train, validation, test, list(far.split(128)))


DIGITS = Kind("digits", "the same pixels in another order", digits)
CLOTHES = Kind("small CNN, Fashion-MNIST", "MNIST", clothes)
SEVERAL = Kind("multi-label: two digits", "the same pixels in another order", several)
SEGMENTATION = Kind("segmentation", "negatives of twice the contrast", segmentation)
