"""Small predictors, exported once, and data for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import propagauss as pg

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pandas")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
NAMES = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Exported:
    """A predictor here and in its files."""

    predictor: Any
    onnx: Path | None = None
    pt2: Path | None = None


def predictor(kind: str) -> Any:
    torch.manual_seed(0)
    layers: dict[str, tuple[list[nn.Module], tuple[int, ...]]] = {
        "classifier": ([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)], (4,)),
        "regressor": ([nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)], (4,)),
        "images": ([nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 40)], (1, 6, 6)),
    }
    modules, shape = layers[kind]
    model = nn.Sequential(*modules).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-2) for n, p in model.named_parameters()})
    net = pg.streamline(model, posterior, torch.zeros(2, *shape))
    return pg.Regressor(net, noise=0.3, scale=2.0) if kind == "regressor" else pg.Classifier(net, scale=0.5)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    folder, found = tmp_path_factory.mktemp("models"), {}
    for kind, forms in {"classifier": ("onnx", "pt2"), "regressor": ("pt2",), "images": ("onnx",)}.items():
        made = predictor(kind)
        found[kind] = Exported(made, **{form: made.export(folder / f"{kind}.{form}") for form in forms})
    return found


@pytest.fixture(scope="session")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)


@pytest.fixture(scope="session")
def table(x: np.ndarray) -> Any:
    return pa.table({"key": [f"k{i}" for i in range(len(x))]} | {name: x[:, i] for i, name in enumerate(NAMES)})
