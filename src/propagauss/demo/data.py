"""The data sets that come with scikit-learn, split and standardised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """Inputs and targets `(x, y)` in three parts; inputs are standardised with the statistics of the training part."""

    train: Pair
    validation: Pair
    test: Pair

    @property
    def train_loader(self) -> list[Pair]:
        return _loader(self.train)

    @property
    def validation_loader(self) -> list[Pair]:
        return _loader(self.validation)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)[1]) for name in ("train", "validation", "test")}


def digits(seed: int = 0) -> Split:
    """Handwritten digits, 8 x 8 pixels, 10 classes: 40% / 20% / 40%, the classes in equal shares."""
    x, y = map(np.asarray, load_digits(return_X_y=True))
    train, rest = _cut(np.arange(len(x)), 0.4, seed, y)
    return _standardise(x, y, (train, *_cut(rest, 1 / 3, seed, y)), classes=True)


def diabetes(seed: int = 0) -> Split:
    """Progress of diabetes after a year from 10 measurements: 50% / 25% / 25%; the target is standardised too."""
    x, y = map(np.asarray, load_diabetes(return_X_y=True))
    train, rest = _cut(np.arange(len(x)), 0.5, seed)
    return _standardise(x, y, (train, *_cut(rest, 0.5, seed)), classes=False)


def body_mass(seed: int = 0, gap: tuple[float, float] = (0.2, 1.4)) -> Split:
    """Progress of diabetes from the body mass index alone; points inside `gap` (standardised) are the test part.

    So the test part lies where nothing was seen in training or validation.
    """
    x, y = map(np.asarray, load_diabetes(return_X_y=True))
    x = x[:, 2:3]  # age, sex, bmi, ...
    z = (x[:, 0] - x.mean()) / x.std()
    inside = (z > gap[0]) & (z < gap[1])
    train, validation = _cut(np.flatnonzero(~inside), 0.65, seed)
    return _standardise(x, y, (train, validation, np.flatnonzero(inside)), classes=False)


def _cut(rows: np.ndarray, share: float, seed: int, classes: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A random `share` of the rows, and the others; with `classes` each is divided in the same proportion."""
    labels = None if classes is None else classes[rows]
    one, other = train_test_split(rows, train_size=share, stratify=labels, random_state=seed)
    return np.asarray(one), np.asarray(other)


def _standardise(x: np.ndarray, y: np.ndarray, parts: tuple[np.ndarray, ...], classes: bool) -> Split:
    train = parts[0]
    scale = x[train].std(0)
    # a pixel that is never set in training keeps its scale: it would otherwise be divided by zero
    inputs = (x - x[train].mean(0)) / np.where(scale > 0, scale, 1)
    targets = y if classes else ((y - y[train].mean()) / y[train].std())[:, None]
    kind = torch.int64 if classes else torch.float32
    return Split(
        *((torch.as_tensor(inputs[p], dtype=torch.float32), torch.as_tensor(targets[p], dtype=kind)) for p in parts)
    )


def _loader(pair: Pair) -> list[Pair]:
    """Batches; a `DataLoader` would only add draws from the global random numbers."""
    return list(zip(*(part.split(256) for part in pair), strict=True))
