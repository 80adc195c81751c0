"""What cannot be used is refused with its name and a remedy, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import propagauss as pg
from propagauss.errors import InputError
from propagauss.predict import predict
from propagauss.predict.models.loading import load
from propagauss.predict.models.model import Model, fit
from propagauss.predict.reading import csv_file

FEW = {"part_rows": 100, "batch": 40, "threads": 1, "progress": False}
NAMES = ("a", "b", "c", "d")


@pytest.fixture
def data(table: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(table, folder / "data.parquet")
    return folder / "data.parquet"


def foreign_onnx(path: Path) -> None:
    shape = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", shape[:1], shape[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def foreign_archive(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(4, 3), (torch.zeros(2, 4),)), path)


def cut(path: Path, good: Path) -> None:
    path.write_bytes(good.read_bytes()[: good.stat().st_size // 2])


def flipped(path: Path, good: Path) -> None:
    """Bits of a weight."""
    found = bytearray(good.read_bytes())
    found[len(found) // 3] ^= 255
    path.write_bytes(found)


def told(path: Path, good: Path, **details: str | None) -> None:
    """A model whose file says something else about it, or nothing."""
    model = onnx.load(good)
    kept = {entry.key: entry.value for entry in model.metadata_props} | details
    helper.set_model_props(model, {name: value for name, value in kept.items() if value is not None})
    onnx.save(model, path)


BAD: dict[str, tuple[str, Callable[[Path, Any], Any]]] = {
    "text.onnx": ("cannot be read as a model", lambda path, good: path.write_text("hello " * 50)),
    "text.pt2": ("cannot be read as a model", lambda path, good: path.write_text("hello " * 50)),
    "empty.onnx": ("cannot be read|is not a predictor", lambda path, good: path.touch()),
    "empty.pt2": ("cannot be read as a model", lambda path, good: path.touch()),
    "cut.onnx": ("cannot be read as a model", lambda path, good: cut(path, good.onnx)),
    "cut.pt2": ("cannot be read as a model", lambda path, good: cut(path, good.pt2)),
    "flipped.pt2": ("cannot be read as a model", lambda path, good: flipped(path, good.pt2)),
    "foreign.onnx": ("is not a predictor of propagauss", lambda path, good: foreign_onnx(path)),
    "foreign.pt2": ("is not a predictor of propagauss", lambda path, good: foreign_archive(path)),
    "weights.pt2": ("is not a predictor of propagauss", lambda path, good: torch.save({"a": torch.zeros(3)}, path)),
    "nobody.onnx": (
        "is not a predictor of propagauss",
        lambda path, good: told(path, good.onnx, predictor=None, columns=None),
    ),
    "broken columns.onnx": ("cannot be read as a model", lambda path, good: told(path, good.onnx, columns="{")),
    "no columns.onnx": ("cannot be read as a model", lambda path, good: told(path, good.onnx, columns="[]")),
    "newer.onnx": (
        r"a column 'median' \(median of rates\)",
        lambda path, good: told(path, good.onnx, columns='{"median": "median of rates"}'),
    ),
    "none.onnx": ("there is no model", lambda path, good: None),
    "model.pkl": ("must end in .onnx or .pt2", lambda path, good: path.touch()),
}


@pytest.mark.parametrize("name", BAD)
def test_models(name: str, exported: Any, data: Path, tmp_path: Path) -> None:
    message, make = BAD[name]
    make(tmp_path / name, exported["classifier"])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        predict(tmp_path / name, data, tmp_path / "out.parquet", **FEW)
    assert sorted(tmp_path.rglob("*")) == before


def test_model_from_before_likelihoods_named_their_columns(exported: Any, data: Path, tmp_path: Path) -> None:
    told(tmp_path / "earlier.onnx", exported["classifier"].onnx, columns=None, likelihood=None)
    for name, model in (("now", exported["classifier"].onnx), ("then", tmp_path / "earlier.onnx")):
        predict(model, data, tmp_path / f"{name}.parquet", **FEW)
    assert pq.read_table(tmp_path / "then.parquet").equals(pq.read_table(tmp_path / "now.parquet"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"columns": ["a", "b", "e", "f"]}, r"no column 'e', 'f' \(there are 'key', 'a', 'b', 'c', 'd'\)"),
    "misspelt": ({"columns": ["a", "b", "c", "D"]}, "no column 'D'"),
    "missing id": ({"id": "kee"}, "no column 'kee'; did you mean 'key'"),
    "too few": ({"columns": ["a", "b"]}, r"takes an input of shape \[4\], but 2 columns .* 'a', 'b'; use --columns"),
    "id is an input": ({"id": "a", "columns": NAMES}, "cannot be both"),
    "one becomes the id": ({"id": "a"}, "but 3 columns"),
    "text": ({"columns": ["key", "b", "c", "d"]}, "'key' of data.parquet does not hold numbers"),
    "twice": ({"columns": ["a", "a", "c", "d"]}, "named more than once"),
    "batch": ({"batch": 0}, "batch is 0"),
    "engine": ({"engine": "lokal"}, "did you mean 'local'"),
    "on_nan": ({"on_nan": "drop"}, "there are error, skip, keep"),
    "workers": ({"workers": 2}, "belong to the engine 'ray'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options(name: str, exported: Any, data: Path, tmp_path: Path) -> None:
    options, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        predict(exported["classifier"].onnx, data, tmp_path / "out.parquet", **FEW | options)
    assert list(tmp_path.iterdir()) == [data.parent]


def test_outputs(exported: Any, data: Path, tmp_path: Path) -> None:
    model = exported["classifier"].onnx
    for out, message in {
        "out.txt": "must end in .parquet or .csv",
        "nowhere/out.csv": "no folder",
        "in/data.parquet": "among the data",
    }.items():
        with pytest.raises(InputError, match=message):
            predict(model, data, tmp_path / out, **FEW)
    with pytest.raises(InputError, match="among the data"):
        predict(model, data.parent, data.parent / "out.csv", **FEW)


def test_data(exported: Any, data: Path, table: Any, tmp_path: Path) -> None:
    model, folder = exported["classifier"].onnx, data.parent

    def refused(path: Path, message: str, **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            predict(model, path, tmp_path / "out.parquet", **FEW | options)
        assert not (tmp_path / "out.parquet").exists()

    refused(tmp_path / "none.csv", "there is no data")
    refused(model, "must end in")
    (folder / "cut.parquet").write_bytes(data.read_bytes()[:500])
    refused(folder / "cut.parquet", "cannot be read")
    (folder / "cut.parquet").unlink()
    pq.write_table(table.drop(["c"]), folder / "other.parquet")
    refused(folder, "other.parquet has no column 'c'")
    refused(data, "has no column 'nope=a'.*INPUT=A,B is for models of several inputs", columns=("nope=a", "b"))
    (folder / "other.parquet").rename(folder / "other.csv")
    refused(folder, r"of different kinds \(data.parquet, other.csv\)")
    np.save(tmp_path / "x.npy", np.zeros((5, 3)))
    refused(tmp_path / "x.npy", r"takes an input of shape \[4\], but x.npy has samples of shape \[3\]")
    refused(tmp_path / "x.npy", "without columns", columns=NAMES)
    refused(tmp_path / "x.npy", "without columns", id="a")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-8])
    refused(tmp_path / "cut.npy", "cut short")
    np.save(tmp_path / "text.npy", np.array(["a", "b"]))
    refused(tmp_path / "text.npy", "must hold numbers")
    (tmp_path / "x.csv").write_text("")
    refused(tmp_path / "x.csv", "no header")
    (tmp_path / "x.csv").write_text("a,b,c,d\n1,2,3,4\n1,2,3\n")
    refused(tmp_path / "x.csv", "Expected 4 columns, got 3")
    (tmp_path / "x.csv").write_text("a;b;c;d\n1;2;3;4\n")
    refused(tmp_path / "x.csv", "no columns of numbers .* separated by commas")
    (tmp_path / "x.csv").write_text("a,b,c,d\n1,2,3,four\n")
    refused(tmp_path / "x.csv", r"chosen: 'a', 'b', 'c' \(in 'd' not all values are numbers\)")
    (tmp_path / "x.csv").write_bytes("a,b,c,é\n1,2,3,4\n".encode("latin-1"))
    refused(tmp_path / "x.csv", "is not UTF-8 .*save it as UTF-8")
    (tmp_path / "x.csv").write_bytes("a,b,c,d,k\n1,2,3,4,é\n".encode("latin-1"))
    refused(tmp_path / "x.csv", "save the file as UTF-8", id="k")


def test_text_among_numbers(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the beginning of the file, from which the kinds of columns are taken."""
    monkeypatch.setattr(csv_file, "HEAD", 1000)
    good = "1.5,2,3,4\n" * 5000
    (tmp_path / "x.csv").write_text(f"a,b,c,d\n{good}1,2,oops,4\n")
    with pytest.raises(InputError, match="row 5000, column 'c' holds 'oops', which is not a number"):
        predict(exported["classifier"].onnx, tmp_path / "x.csv", tmp_path / "out.parquet", progress=False)


def test_lists_of_other_lengths(exported: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1.0, 2, 3, 4]] * 150 + [[1.0, 2]]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"lists of 2 and of 4 entries in column 'x'"):
        predict(exported["classifier"].onnx, tmp_path / "x.parquet", tmp_path / "out.parquet", **FEW)


@pytest.fixture
def holes(table: Any, tmp_path: Path) -> Path:
    values = table.to_pandas().astype(dict.fromkeys(NAMES, "float64"))
    values.loc[123, "b"], values.loc[124, "c"], values.loc[500, "d"] = np.nan, -np.inf, 1e300  # too large for float32
    values.to_parquet(tmp_path / "holes.parquet")
    values.to_csv(tmp_path / "holes.csv", index=False)
    np.save(tmp_path / "holes.npy", values[list(NAMES)].to_numpy())
    good = values[list(NAMES)].abs().max(axis=1, skipna=False) < 1e30
    lists = pa.array([row if good[i] else None for i, row in enumerate(values[list(NAMES)].to_numpy())])
    pq.write_table(pa.table({"x": lists}), tmp_path / "lists.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["holes.parquet", "holes.csv", "holes.npy", "lists.parquet"])
def test_values_that_are_not_finite(name: str, exported: Any, holes: Path, x: np.ndarray) -> None:
    model, out = exported["classifier"].onnx, holes / "out.parquet"
    place = {"holes.npy": "entry 1", "lists.parquet": "column 'x', entry 0"}.get(name, "column 'b'")
    with pytest.raises(InputError, match=rf"row 123, {place} is nan .*\(and 1 more .*--on-nan skip.*--on-nan keep"):
        predict(model, holes / name, out, **FEW | {"batch": 200, "part_rows": 200})
    assert not out.exists()
    summary = predict(model, holes / name, out, on_nan="skip", restart=True, **FEW)
    skipped = pq.read_table(out).to_pandas()
    assert (summary.rows, summary.skipped) == (997, 3) and len(skipped) == 997
    assert not {123, 124, 500} & set(skipped["row"]) and np.isfinite(skipped.to_numpy()).all()
    predict(model, holes / name, out, on_nan="keep", overwrite=True, **FEW)
    kept = pq.read_table(out).to_pandas()
    assert list(kept["row"]) == list(range(1000))
    assert kept.loc[[123, 124, 500], kept.columns[1:]].isna().to_numpy().all()
    np.testing.assert_array_equal(kept.drop([123, 124, 500]).to_numpy(), skipped.to_numpy())


def test_all_rows_skipped(exported: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.full((30, 4), np.nan))
    summary = predict(exported["classifier"].onnx, tmp_path / "x.npy", tmp_path / "out.csv", on_nan="skip", **FEW)
    assert (summary.rows, summary.skipped) == (0, 30)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1


def test_whole_numbers(tmp_path: Path) -> None:
    """A model of tokens takes no fractions."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2)).eval()
    posterior = pg.DiagonalPosterior({"2.weight": torch.full((2, 12), 0.1)})
    classifier = pg.Classifier(pg.streamline(model, posterior, torch.zeros(2, 3, dtype=torch.long)))
    path = classifier.export(tmp_path / "m.pt2")
    tokens = np.random.default_rng(0).integers(0, 10, (20, 3))
    np.save(tmp_path / "x.npy", tokens)
    predict(path, tmp_path / "x.npy", tmp_path / "out.parquet", **FEW)
    found = pq.read_table(tmp_path / "out.parquet")
    expected = classifier(torch.from_numpy(tokens)).probs[:, 0].detach()
    np.testing.assert_allclose(found["probability_0"].to_numpy(), expected, atol=1e-5)
    np.save(tmp_path / "y.npy", tokens + 0.5)
    with pytest.raises(InputError, match="takes int64"):
        predict(path, tmp_path / "y.npy", tmp_path / "out2.parquet", **FEW)


@pytest.mark.parametrize(
    ("shape", "wanted", "expected"),
    [
        ((4,), (4,), (4,)),
        ((4,), (None,), (4,)),
        ((36,), (1, 6, 6), (1, 6, 6)),
        ((6, 6), (1, 6, 6), (1, 6, 6)),
        ((1, 4), (4,), (4,)),
        ((6, 6, 3), (3, 6, 6), None),
        ((36,), (1, None, 6), (1, 6, 6)),
        ((36,), (None, None), None),
        ((5,), (4,), None),
    ],
)
def test_shapes(shape: tuple[int, ...], wanted: Any, expected: Any) -> None:
    assert fit(shape, wanted) == expected


def test_model_that_fails(exported: Any) -> None:
    with pytest.raises(InputError, match=r"failed on an input of shape \[2, 5\] .* smaller batch"):
        load(exported["classifier"].onnx)(np.zeros((2, 5), np.float32))


def test_load(exported: Any) -> None:
    for path in (exported["classifier"].onnx, exported["classifier"].pt2):
        model = load(path, threads=1)
        assert isinstance(model, Model)
        (taken,) = model.inputs
        assert (list(model.columns), taken.shape) == (["prediction", "entropy"], (4,))
        assert (taken.name, taken.dtype, model.batch) == ("x", np.float32, None)
