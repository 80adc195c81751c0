"""Quick runs of the experiments, each made once for all tests that look at it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.frame.experiment import Context, Record
from experiments.frame.names import experiment
from experiments.frame.store import Store
from propagauss.tracing.once import traced_once

UCI = {"servo": 4, "ld": 5, "am": 7, "rev": 6, "ff": 12, "itt": 33, "ccs": 8, "asn": 5, "cac": 127, "pt": 19, "ccpp": 4}


def _images(path: Path, train: int, test: int, size: tuple[int, ...], classes: int, validation: int = 0) -> None:
    """Bars whose place tells the class, so that there is something to learn."""
    generator = np.random.default_rng(0)
    parts = {"train": train, "test": test} | ({"val": validation} if validation else {})
    arrays = {}
    for part, count in parts.items():
        y = np.arange(count) % classes
        x = generator.integers(0, 80, (count, *size))
        for row, label in enumerate(y):
            x[row, 2 * label : 2 * label + 3] += 150
        arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y.astype(np.uint8)}
    np.savez(path, **arrays)


def _rows(count: int, **fields: str) -> str:
    return "".join(
        json.dumps({"idx": i, "label": i % 2} | {k: v.format(i) for k, v in fields.items()}) + "\n"
        for i in range(count)
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for part in ("images", "uci"):
        (folder / part).mkdir()
    _images(folder / "images" / "mnist.npz", 11_500, 600, (28, 28), 10)
    _images(folder / "images" / "pneumoniamnist.npz", 600, 200, (28, 28), 2, validation=200)
    _images(folder / "images" / "cifar10.npz", 1500, 300, (32, 32, 3), 10)
    _images(folder / "images" / "dtd10_64px.npz", 100, 100, (64, 64, 3), 10, validation=100)
    generator = np.random.default_rng(0)
    for name, inputs in UCI.items():
        x = generator.normal(size=(120, inputs))
        table = np.column_stack([x, x[:, 0] + 0.1 * generator.normal(size=120)])
        names = ",".join(f"c{i}" for i in range(inputs + 1))
        np.savetxt(folder / "uci" / f"{name}.csv", table, delimiter=",", header=names, comments="")
    sentences = {
        "sentence1": "the cat {} sat",
        "sentence2": "a dog {} ran",
        "word": "cat",
        "question": "is {} even",
        "passage": "a number {}",
    }
    for task in ("boolq", "mrpc", "wic"):
        (folder / "text" / task).mkdir(parents=True)
        for part in ("train", "validation", "test"):
            (folder / "text" / task / f"{part}.jsonl").write_text(_rows(120, **sentences))
    return folder


@pytest.fixture(scope="session")
def with_fashion(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the set of images that only outliers need: experiments on every set would do the same once more."""
    folder = shutil.copytree(data, tmp_path_factory.mktemp("more data"), dirs_exist_ok=True)
    shutil.copy(folder / "images" / "mnist.npz", folder / "images" / "fashion_mnist.npz")
    return folder


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks that one experiment has trained serve the next, as they do in one results folder."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def quick(
    data: Path, with_fashion: Path, kept: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Context, Path]]:
    """`python -m experiments NAME --quick`, run when it is first asked for: what it was given, and its results."""

    @cache
    def run(name: str) -> tuple[Context, Path]:
        missing = [module for module in experiment(name).needs if find_spec(module) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}")
        results = tmp_path_factory.mktemp(name)
        (results / "cache").symlink_to(kept)
        folder = with_fashion if name in ("ood", "calibration", "valla") else data
        with traced_once():
            assert main([name, "--quick", "--data", str(folder), "--results", str(results)]) == 0
        return Context("quick", 0, folder, kept), results

    return run


@pytest.fixture(scope="session")
def records(quick: Callable[[str], tuple[Context, Path]]) -> Callable[[str], dict[str, Record]]:
    """What the units of an experiment found in its quick run, by their keys."""

    def read(name: str) -> dict[str, Record]:
        return {key: r["results"] for key, r in Store(quick(name)[1], name, "quick").records().items()}

    return read
