"""Models of several inputs: named columns become named inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv
from torch import nn

import propagauss as pg
from propagauss import cli
from propagauss.errors import InputError
from propagauss.predict import predict

FEW = {"part_rows": 16, "batch": 7, "threads": 1, "progress": False}
ROWS = 40


class Two(nn.Module):
    """Numbers and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(10, 3), nn.Linear(7, 2)

    def forward(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, self.words(tokens).mean(1)], 1))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    torch.manual_seed(0)
    model = Two().eval()
    posterior = pg.DiagonalPosterior({"layer.weight": torch.full((2, 7), 0.1)})
    example = {"tokens": torch.zeros(2, 3, dtype=torch.long), "x": torch.zeros(2, 4)}
    classifier = pg.Classifier(pg.streamline(model, posterior, example))
    folder = tmp_path_factory.mktemp("two")
    return classifier, {form: classifier.export(folder / f"m.{form}") for form in ("onnx", "pt2")}


@pytest.fixture(scope="module")
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, 10, (ROWS, 3)), "x": rng.normal(size=(ROWS, 4)).astype(np.float32)}


def assert_predicted(path: Path, classifier: Any, data: dict[str, np.ndarray]) -> None:
    found = pq.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)
    with torch.no_grad():
        expected = classifier({name: torch.from_numpy(value) for name, value in data.items()}).probs
    np.testing.assert_allclose(found["probability_1"].to_numpy(), expected[:, 1], atol=1e-5)


def numbered(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}_{i}": value[:, i] for name, value in data.items() for i in range(value.shape[1])}


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_lists_and_numbers(form: str, two: Any, data: dict[str, np.ndarray], tmp_path: Path) -> None:
    classifier, paths = two
    lists = pa.table({"x": list(data["x"]), "id": np.arange(ROWS), "tokens": list(data["tokens"])})
    pq.write_table(lists, tmp_path / "lists.parquet")
    predict(paths[form], tmp_path / "lists.parquet", tmp_path / "a.parquet", id="id", **FEW)
    assert_predicted(tmp_path / "a.parquet", classifier, data)
    csv.write_csv(pa.table(numbered(data)), tmp_path / "numbers.csv")
    predict(paths[form], tmp_path / "numbers.csv", tmp_path / "b.csv", **FEW)
    assert_predicted(tmp_path / "b.csv", classifier, data)


def test_columns_by_input(two: Any, data: dict[str, np.ndarray], tmp_path: Path) -> None:
    classifier, paths = two
    names = {"x": list("abcd"), "tokens": ["words"]}
    columns = {"words": list(data["tokens"])} | {name: data["x"][:, i] for i, name in enumerate("abcd")}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    predict(paths["onnx"], tmp_path / "data.parquet", tmp_path / "a.parquet", columns=names, **FEW)
    assert_predicted(tmp_path / "a.parquet", classifier, data)
    arguments = ["predict", str(paths["onnx"]), str(tmp_path / "data.parquet"), "--threads", "1"]
    out = tmp_path / "b.parquet"
    assert cli.main([*arguments, "--out", str(out), "--columns", "x=a,b,c,d,tokens=words"]) == 0
    assert_predicted(out, classifier, data)


def test_uncertain_inputs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    posterior = pg.DiagonalPosterior({"0.weight": torch.full((3, 4), 0.1)})
    example = pg.Gaussian(torch.zeros(2, 4), variance=torch.ones(2, 4))
    classifier = pg.Classifier(pg.streamline(model, posterior, example))
    path = classifier.export(tmp_path / "m.pt2")
    mean, variance = torch.randn(ROWS, 4), torch.rand(ROWS, 4)
    pq.write_table(
        pa.table({"x_mean": list(mean.numpy()), "x_variance": list(variance.numpy())}), tmp_path / "x.parquet"
    )
    predict(path, tmp_path / "x.parquet", tmp_path / "out.parquet", **FEW)
    with torch.no_grad():
        expected = classifier(pg.Gaussian(mean, variance=variance)).probs[:, 0]
    found = pq.read_table(tmp_path / "out.parquet")["probability_0"].to_numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


WRONG: dict[str, tuple[Any, str]] = {
    "no input of that name": ({"x": ["x"], "y": ["tokens"]}, "takes 'tokens', 'x', but there are columns for 'x', 'y'"),
    "one is missing": ({"x": ["x"]}, "but there are columns for 'x'"),
    "not said": (["x", "tokens"], "say which of them 'x' is"),
    "too wide": ({"x": ["tokens"], "tokens": ["x"]}, r"takes an input 'x' of shape \[4\]"),
    "twice": ({"x": ["x"], "tokens": ["x"]}, "named more than once"),
    "none": ([], "must be names of columns"),
    "a text": ("x", "give a list of names"),
    "numbers": ([1, 2], "must be names of columns"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_columns(name: str, two: Any, data: dict[str, np.ndarray], tmp_path: Path) -> None:
    columns, message = WRONG[name]
    pq.write_table(pa.table({name: list(value) for name, value in data.items()}), tmp_path / "data.parquet")
    with pytest.raises(InputError, match=message):
        predict(two[1]["onnx"], tmp_path / "data.parquet", tmp_path / "out.csv", columns=columns, **FEW)


def test_data_without_the_names(two: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 7)))
    with pytest.raises(InputError, match="is one array: give a table"):
        predict(two[1]["onnx"], tmp_path / "x.npy", tmp_path / "out.csv", **FEW)
    (tmp_path / "x.csv").write_text("x,y\n1,2\n")
    with pytest.raises(InputError, match=r"no column 'tokens' .*--columns tokens=A,B,x=A,B"):
        predict(two[1]["onnx"], tmp_path / "x.csv", tmp_path / "out.csv", **FEW)


@pytest.mark.parametrize("token", [10**17, 2**53 + 2, -1.5])
def test_numbers_that_are_no_tokens(token: float, two: Any, data: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Those beyond 2**53 could be read as others."""
    columns = numbered(data) | {"tokens_1": np.full(ROWS, token)}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    with pytest.raises(InputError, match="takes int64 as 'tokens'"):
        predict(two[1]["onnx"], tmp_path / "data.parquet", tmp_path / "out.csv", **FEW)


def test_half_precision_that_numpy_does_not_have(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).eval().bfloat16()
    posterior = pg.DiagonalPosterior({"weight": torch.full((3, 4), 0.1, dtype=torch.bfloat16)})
    classifier = pg.Classifier(pg.streamline(model, posterior, torch.zeros(2, 4, dtype=torch.bfloat16)))
    path = classifier.export(tmp_path / "m.pt2")
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    predict(path, tmp_path / "x.npy", tmp_path / "out.parquet", **FEW)
    found = pq.read_table(tmp_path / "out.parquet")["probability_0"].to_numpy()
    with torch.no_grad():
        expected = classifier(torch.from_numpy(x).bfloat16()).probs[:, 0].float()
    np.testing.assert_allclose(found, expected, atol=2e-2)
