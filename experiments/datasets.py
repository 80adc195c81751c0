"""The data of the experiments, read from a folder that the user names; nothing is downloaded.

Layout: `uci/*.csv` (header, last column the target), `images/*.npz` (`x_train y_train x_test y_test`, some with `x_val
y_val`; MedMNIST's own names are understood), `images/svhn_test_32x32.mat`, `text/TASK/{train,validation,test}.jsonl`.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.frame.experiment import Context
from propagauss.errors import PropagaussError

Pair = tuple[Tensor, Tensor]

SOURCES = {
    "uci": "the UCI Machine Learning Repository (archive.ics.uci.edu)",
    "mnist": "the MNIST files of LeCun, Cortes and Burges, as one npz",
    "fashion_mnist": "github.com/zalandoresearch/fashion-mnist, as one npz",
    "pneumoniamnist": "medmnist.com (pneumoniamnist.npz)",
    "organcmnist": "medmnist.com (organcmnist.npz)",
    "organsmnist": "medmnist.com (organsmnist.npz)",
    "cifar10": "www.cs.toronto.edu/~kriz/cifar.html, as one npz of channels-last images",
    "dtd10_64px": "www.robots.ox.ac.uk/~vgg/data/dtd, ten classes at 64 pixels, as one npz",
    "svhn_test_32x32": "ufldl.stanford.edu/housenumbers (test_32x32.mat)",
    "text": "GLUE and SuperGLUE (gluebenchmark.com, super.gluebenchmark.com)",
}


class DataMissing(PropagaussError):
    """A file of the data folder that an experiment needs is not there."""


@dataclass(frozen=True)
class Images:
    """Images in [0, 1], channels first (`[N, C, H, W]`), and their labels, in three parts."""

    train: Pair
    validation: Pair
    test: Pair
    classes: int

    def flat(self) -> Images:
        """Images as vectors."""
        train, validation, test = ((x.flatten(1), y) for x, y in (self.train, self.validation, self.test))
        return Images(train, validation, test, self.classes)


@dataclass(frozen=True)
class Table:
    """Columns of a CSV file: numbers, with NaN where a field is empty, or text."""

    names: list[str]
    columns: list[np.ndarray]
    target: np.ndarray


def available(context: Context, *parts: str) -> bool:
    return context.data_folder is not None and context.data_folder.joinpath(*parts).is_file()


def path(context: Context, *parts: str) -> Path:
    """A file of the data folder, or an error that says which is missing and where to get it."""
    folder, wanted = context.data_folder, "/".join(parts)
    name = parts[0] if parts[0] in SOURCES else Path(parts[-1]).stem
    source = f"; it comes from {SOURCES[name]}" if name in SOURCES else ""
    if folder is None:
        raise DataMissing(f"{wanted} is needed: name the data folder with --data DIR or PROPAGAUSS_DATA{source}")
    if not folder.joinpath(*parts).is_file():
        raise DataMissing(f"no {wanted} in {folder}{source} (docs/experiments.md describes the folder)")
    return folder.joinpath(*parts)


def images(context: Context, name: str, validation: int = 10_000) -> Images:
    """`images/NAME.npz`; where it has no validation part, the last `validation` training images are that."""
    file = path(context, "images", f"{name}.npz")
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {_medmnist(key): stored[key] for key in stored.files if stored[key].dtype.kind in "ui"}
        parts = {part: (_pixels(arrays[f"x_{part}"]), _labels(arrays[f"y_{part}"])) for part in ("train", "test")}
    except (KeyError, ValueError, OSError) as error:
        raise DataMissing(f"{file} does not hold x_train, y_train, x_test and y_test as unsigned integers") from error
    x, y = parts["train"]
    if "x_val" in arrays:
        held = (_pixels(arrays["x_val"]), _labels(arrays["y_val"]))
    else:
        x, y, held = x[:-validation], y[:-validation], (x[-validation:], y[-validation:])
    return Images((x, y), held, parts["test"], int(torch.cat([y, parts["test"][1]]).max()) + 1)


def svhn(context: Context) -> Pair:
    """The test part of SVHN, cropped digits."""
    from scipy.io import loadmat

    stored = loadmat(path(context, "images", "svhn_test_32x32.mat"))
    return _pixels(np.moveaxis(stored["X"], -1, 0)), torch.from_numpy(stored["y"].astype(np.int64).ravel() % 10)


def uci(context: Context, name: str) -> Table:
    """`uci/NAME.csv`"""
    with path(context, "uci", f"{name}.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    columns = [_column([row[i] for row in rows]) for i in range(len(head))]
    return Table(head[:-1], columns[:-1], columns[-1])


def text(context: Context, task: str, part: str) -> list[dict[str, Any]]:
    """Rows of `text/TASK/PART.jsonl`."""
    with path(context, "text", task, f"{part}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def batches(pair: Pair, size: int = 500) -> list[Pair]:
    """Consecutive batches, as a list: every method sees the same tensors."""
    return list(zip(*(part.split(size) for part in pair), strict=True))


def _medmnist(key: str) -> str:
    """`train_images` -> `x_train`, as the other files name it."""
    part, _, kind = key.partition("_")
    return {"images": f"x_{part}", "labels": f"y_{part}"}.get(kind, key)


def _pixels(array: np.ndarray) -> Tensor:
    x = torch.from_numpy(np.ascontiguousarray(array)).float() / 255
    return x.unsqueeze(1) if x.dim() == 3 else x.movedim(-1, 1).contiguous()


def _labels(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64).ravel())


def _column(fields: list[str]) -> np.ndarray:
    try:
        return np.array([float(f) if f.strip() else np.nan for f in fields])
    except ValueError:
        return np.array(fields)
