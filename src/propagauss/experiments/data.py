"""The data sets that come with scikit-learn, split and standardised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """Inputs and targets `(x, y)` in three parts; inputs are standardised with the statistics of the training part."""

    train: Pair
    validation: Pair
    test: Pair

    @property
    def train_loader(self) -> DataLoader:
        return _loader(self.train)

    @property
    def validation_loader(self) -> DataLoader:
        return _loader(self.validation)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)[1]) for name in ("train", "validation", "test")}


def digits(seed: int = 0) -> Split:
    """Handwritten digits, 8 x 8 pixels, 10 classes: 40% / 20% / 40%, the classes in equal shares."""
    x, y = load_digits(return_X_y=True)
    return _split(np.asarray(x), np.asarray(y), (0.4, 0.2), seed, classes=True)


def diabetes(seed: int = 0) -> Split:
    """Progress of diabetes after a year from 10 measurements: 50% / 25% / 25%; the target is standardised too."""
    x, y = load_diabetes(return_X_y=True)
    return _split(np.asarray(x), np.asarray(y), (0.5, 0.25), seed, classes=False)


def body_mass(seed: int = 0, gap: tuple[float, float] = (0.2, 1.4)) -> Split:
    """Progress of diabetes from the body mass index alone; points inside `gap` (standardised) are the test part.

    So the test part lies where nothing was seen in training or validation.
    """
    data = load_diabetes(as_frame=True)
    x, y = data["data"][["bmi"]].to_numpy(), data["target"].to_numpy()
    z = (x[:, 0] - x.mean()) / x.std()
    inside = (z > gap[0]) & (z < gap[1])
    train, validation = train_test_split(np.flatnonzero(~inside), train_size=0.65, random_state=seed)
    return _standardise(x, y, (train, validation, np.flatnonzero(inside)), classes=False)


def _split(x: np.ndarray, y: np.ndarray, shares: tuple[float, float], seed: int, classes: bool) -> Split:
    train, rest = train_test_split(
        np.arange(len(x)), train_size=shares[0], stratify=y if classes else None, random_state=seed
    )
    validation, test = train_test_split(
        rest, train_size=shares[1] / (1 - shares[0]), stratify=y[rest] if classes else None, random_state=seed
    )
    return _standardise(x, y, (train, validation, test), classes)


def _standardise(x: np.ndarray, y: np.ndarray, parts: tuple[np.ndarray, ...], classes: bool) -> Split:
    train = parts[0]
    scale = x[train].std(0)
    # a pixel that is never set in training keeps its scale: it would otherwise be divided by zero
    inputs = (x - x[train].mean(0)) / np.where(scale > 0, scale, 1)
    targets = y if classes else ((y - y[train].mean()) / y[train].std())[:, None]
    kind = torch.int64 if classes else torch.float32
    return Split(*((torch.as_tensor(inputs[p], dtype=torch.float32), torch.as_tensor(targets[p], dtype=kind)) for p in parts))


def _loader(pair: Pair) -> DataLoader:
    return DataLoader(TensorDataset(*pair), batch_size=256)
