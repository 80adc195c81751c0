"""Predictions of files equal those of the predictor in this process, from whatever data to whatever output."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv

from propagauss.predict import predict

FEW = {"part_rows": 128, "batch": 50, "threads": 1, "progress": False}
NAMES = ("a", "b", "c", "d")


def read(path: Path) -> Any:
    return pq.read_table(path) if path.suffix == ".parquet" else csv.read_csv(path)


def column(table: Any, name: str, width: int) -> np.ndarray:
    return np.stack([table[f"{name}_{i}"].to_numpy() for i in range(width)], axis=1)


def assert_predicted(table: Any, classifier: Any, x: np.ndarray) -> None:
    with torch.no_grad():
        latent, found = classifier.latent(torch.from_numpy(x)), classifier(torch.from_numpy(x))
    np.testing.assert_allclose(column(table, "mean", 3), latent.mean, atol=1e-5)
    np.testing.assert_allclose(column(table, "variance", 3), latent.variance, atol=1e-5)
    np.testing.assert_allclose(column(table, "probability", 3), found.probs, atol=1e-5)
    np.testing.assert_allclose(table["entropy"].to_numpy(), found.entropy(), atol=1e-5)
    assert (table["prediction"].to_numpy() == column(table, "probability", 3).argmax(1)).all()


def write(kind: str, table: Any, folder: Path) -> Path:
    """The same rows, in each of the forms that data may have."""
    path = folder / f"data.{kind.removeprefix('many ')}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=170)
    elif kind == "csv":
        csv.write_csv(table, path)
    elif kind == "npy":
        np.save(path, np.stack([table[name].to_numpy() for name in NAMES], axis=1))
    else:
        path.mkdir()
        (path / ".hidden.parquet").write_text("not data")
        cuts = (0, 0, 300, 310, 310, 700, 1000)  # some files are empty, the first too
        for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
            one = write(kind.removeprefix("many "), table.slice(start, stop - start), path)
            one.rename(path / f"{i}{path.suffix}")
    return path


@pytest.mark.parametrize("kind", ["parquet", "csv", "npy", "many parquet", "many csv"])
@pytest.mark.parametrize("model", ["onnx", "pt2"])
def test_every_source(kind: str, model: str, exported: Any, table: Any, x: np.ndarray, tmp_path: Path) -> None:
    data = write(kind, table, tmp_path)
    summary = predict(getattr(exported["classifier"], model), data, tmp_path / "out.parquet", **FEW)
    found = read(tmp_path / "out.parquet")
    assert found["row"].to_pylist() == list(range(1000))
    assert_predicted(found, exported["classifier"].predictor, x)
    assert (summary.rows, summary.skipped, summary.resumed) == (1000, 0, 0) and summary.rate > 0
    assert summary.columns == (() if kind == "npy" else NAMES)
    assert sorted(tmp_path.iterdir()) == sorted([data, tmp_path / "out.parquet"])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_ids_and_columns(ending: str, kind: str, exported: Any, table: Any, x: np.ndarray, tmp_path: Path) -> None:
    ids = [f'0{i}, "quoted"' for i in range(1000)]
    mixed = table.append_column("no, thing", [ids]).select(["d", "no, thing", "b", "a", "c"])
    data = write(kind, mixed, tmp_path)
    out = tmp_path / f"out.{ending}"
    predict(exported["classifier"].onnx, data, out, id="no, thing", columns=NAMES, **FEW)
    assert read(out)["no, thing"].to_pylist() == ids and "row" not in read(out).column_names
    assert_predicted(read(out), exported["classifier"].predictor, x)
    predict(exported["classifier"].onnx, data, out, columns=list("dbac"), overwrite=True, **FEW)
    assert_predicted(read(out), exported["classifier"].predictor, x[:, [3, 1, 0, 2]])


def test_batches_and_parts_change_nothing(exported: Any, table: Any, tmp_path: Path) -> None:
    data = write("parquet", table, tmp_path)
    model, found = exported["classifier"].onnx, []
    for i, (batch, part) in enumerate([(None, None), (3, 400), (7, 333), (5000, 2000)]):
        predict(model, data, tmp_path / f"{i}.parquet", batch=batch, part_rows=part, progress=False)
        found.append(read(tmp_path / f"{i}.parquet").to_pandas().to_numpy())
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-6)


def test_regressor(exported: Any, table: Any, x: np.ndarray, tmp_path: Path) -> None:
    data = write("parquet", table, tmp_path)
    predict(exported["regressor"].pt2, data, tmp_path / "out.csv", **FEW)
    found = read(tmp_path / "out.csv")
    assert found.column_names == ["row", "mean", "variance", "epistemic_variance"]
    regressor = exported["regressor"].predictor
    with torch.no_grad():
        expected, parts = regressor(torch.from_numpy(x)), regressor.decompose(torch.from_numpy(x))
    np.testing.assert_allclose(found["mean"].to_numpy(), expected.mean[:, 0], atol=1e-5)
    np.testing.assert_allclose(found["variance"].to_numpy(), expected.variance[:, 0], atol=1e-5)
    np.testing.assert_allclose(found["epistemic_variance"].to_numpy(), parts.epistemic[:, 0], atol=1e-5)


def image_columns(images: np.ndarray) -> dict[str, Any]:
    flat = images.reshape(len(images), -1)
    fixed = pa.FixedSizeListArray.from_arrays(flat.reshape(-1), 36)
    rows = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat.reshape(-1), 6), 6)
    return {
        "fixed": fixed,
        "any length": pa.array(list(flat)),
        "nested": rows,
        "tensor": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), (1, 6, 6)), fixed),
    }


@pytest.mark.parametrize("form", ["fixed", "any length", "nested", "tensor", "array", "flat array"])
def test_images(form: str, exported: Any, tmp_path: Path) -> None:
    images = np.random.default_rng(1).normal(size=(90, 1, 6, 6)).astype(np.float32)
    data = tmp_path / ("data.npy" if "array" in form else "data.parquet")
    if "array" in form:
        np.save(data, images if form == "array" else images.reshape(90, 36))
    else:
        pq.write_table(pa.table({"image": image_columns(images)[form], "label": np.arange(90)}), data)
    few = FEW | {"part_rows": 40, "batch": 16}
    predict(exported["images"].onnx, data, tmp_path / "out.parquet", **few)
    found = read(tmp_path / "out.parquet")
    assert found.column_names == [
        "row",
        "prediction",
        "entropy",
        "mean",
        "variance",
        "probability",
    ]  # 40 classes: lists
    with torch.no_grad():
        expected = exported["images"].predictor(torch.from_numpy(images)).probs
    np.testing.assert_allclose(np.stack(found["probability"].to_numpy()), expected, atol=1e-5)
    predict(exported["images"].onnx, data, tmp_path / "out.csv", **few)
    np.testing.assert_allclose(column(read(tmp_path / "out.csv"), "probability", 40), expected, atol=1e-5)


def test_kinds_of_numbers(exported: Any, tmp_path: Path) -> None:
    """Integers, decimals, truth values and half precision are numbers too."""
    import decimal

    exact = pa.array([decimal.Decimal("1.5"), decimal.Decimal("-2.25")])
    columns = {"a": pa.array([1, 2], pa.uint8()), "b": exact, "c": pa.array([True, False])}
    half = pa.array(np.array([0.5, 0.25], np.float16))
    pq.write_table(pa.table(columns | {"d": half, "when": ["x", "y"]}), tmp_path / "data.parquet")
    predict(exported["classifier"].onnx, tmp_path / "data.parquet", tmp_path / "out.parquet", **FEW)
    x = np.array([[1, 1.5, 1, 0.5], [2, -2.25, 0, 0.25]], np.float32)
    assert_predicted(read(tmp_path / "out.parquet"), exported["classifier"].predictor, x)


@pytest.mark.parametrize("kind", ["parquet", "csv", "npy"])
def test_no_rows(kind: str, exported: Any, table: Any, tmp_path: Path) -> None:
    data = write(kind, table.slice(0, 0), tmp_path)
    columns = NAMES if kind == "csv" else None  # nothing shows there what holds numbers
    assert predict(exported["classifier"].onnx, data, tmp_path / "out.parquet", columns=columns, **FEW).rows == 0
    assert read(tmp_path / "out.parquet").column_names[:3] == ["row", "prediction", "entropy"]


def test_ids_of_a_category(exported: Any, table: Any, tmp_path: Path) -> None:
    """Whose codes differ from file to file."""
    data = tmp_path / "data"
    data.mkdir()
    for i in range(2):
        part = table.slice(500 * i, 500)
        pq.write_table(part.set_column(0, "key", part["key"].dictionary_encode()), data / f"{i}.parquet")
    predict(exported["classifier"].onnx, data, tmp_path / "out.parquet", id="key", **FEW)
    assert read(tmp_path / "out.parquet")["key"].equals(table["key"])


@pytest.mark.parametrize("batch", [4, 7])
def test_fixed_batch(batch: int, exported: Any, x: np.ndarray) -> None:
    from dataclasses import replace

    from propagauss.predict.models.loading import load

    model = load(exported["classifier"].onnx)

    def only(values: np.ndarray) -> dict[str, np.ndarray]:
        assert len(values) == batch
        return model(values)

    found = replace(model, batch=batch, run=only)(x[:30])
    np.testing.assert_allclose(found["mean"], model(x[:30])["mean"], atol=1e-6)
