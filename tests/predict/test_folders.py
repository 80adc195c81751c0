"""No file of a folder is left out silently, and nothing is read twice."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from propagauss import cli
from propagauss.errors import InputError
from propagauss.predict import predict

FEW = {"part_rows": 128, "batch": 50, "threads": 1, "progress": False}


@pytest.fixture
def folder(table: Any, tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    pq.write_table(table.slice(0, 400), tmp_path / "data" / "a.parquet")
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["b.PARQUET", "b.pq", "b.parq", "b.Parquet", "below/b.parquet"])
def test_other_spellings(name: str, exported: Any, table: Any, folder: Path, tmp_path: Path) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    pq.write_table(table.slice(400), folder / name)
    summary = predict(exported["classifier"].onnx, folder, tmp_path / "out.parquet", **FEW)
    assert (summary.rows, summary.files) == (1000, 2)
    assert "1,000 rows found in 2 files" in str(summary)


def test_links_to_folders(exported: Any, table: Any, folder: Path, tmp_path: Path) -> None:
    """They are followed, each folder once: also when they lead in a circle."""
    (tmp_path / "elsewhere").mkdir()
    pq.write_table(table.slice(400), tmp_path / "elsewhere" / "b.parquet")
    (folder / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (folder / "again").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere" / "circle").symlink_to(folder, target_is_directory=True)
    summary = predict(exported["classifier"].onnx, folder, tmp_path / "out.parquet", **FEW)
    assert (summary.rows, summary.files) == (1000, 2)


def text(content: str | bytes = "x") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


STRANGE: dict[str, Callable[[Path], object]] = {
    "b.csv.gz": text(gzip.compress(b"a,b,c,d\n1,2,3,4\n")),
    "b.tsv": text("a\tb\n"),
    "b.parquet.zst": text(),
    "b": text(),
    "notes.txt": text("read me"),
    "gone.parquet": lambda path: path.symlink_to("nowhere"),
    "pipe.parquet": lambda path: os.mkfifo(path),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_cannot_be_read_is_named(name: str, exported: Any, folder: Path, tmp_path: Path) -> None:
    STRANGE[name](folder / name)
    with pytest.raises(InputError, match=rf"holds {name}, which cannot be read .* move them away"):
        predict(exported["classifier"].onnx, folder, tmp_path / "out.parquet", **FEW)


def test_kinds_are_not_mixed(exported: Any, table: Any, folder: Path, tmp_path: Path) -> None:
    csv.write_csv(table, folder / "b.csv")
    np.save(folder / "c.npy", np.zeros((3, 4)))
    with pytest.raises(InputError, match=r"of different kinds \(a\.parquet, b\.csv\)"):
        predict(exported["classifier"].onnx, folder, tmp_path / "out.parquet", **FEW)


def test_arrays(exported: Any, x: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "0.npy", x[:300])
    np.save(tmp_path / "data" / "1.npy", np.asfortranarray(x[300:]))
    model = exported["classifier"].onnx
    predict(model, tmp_path / "data", tmp_path / "out.parquet", **FEW)
    np.save(tmp_path / "x.npy", x)
    predict(model, tmp_path / "x.npy", tmp_path / "expected.parquet", **FEW)
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "expected.parquet"))
    np.save(tmp_path / "data" / "2.npy", x[:, :3])
    with pytest.raises(InputError, match=r"of shape \[4\] in 0\.npy, \[3\] in 2\.npy"):
        predict(model, tmp_path / "data", tmp_path / "out2.parquet", **FEW)


def test_hidden_files_are_left_out(exported: Any, folder: Path, tmp_path: Path) -> None:
    (folder / "_SUCCESS").touch()
    (folder / ".crc").touch()
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "half.parquet").touch()
    assert predict(exported["classifier"].onnx, folder, tmp_path / "out.parquet", **FEW).rows == 400


def test_fortran_order_of_images(exported: Any, tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(30, 1, 6, 6)).astype(np.float32)
    model = exported["images"].onnx
    for name, array in (("c", images), ("f", np.asfortranarray(images))):
        np.save(tmp_path / f"{name}.npy", array)
        predict(model, tmp_path / f"{name}.npy", tmp_path / f"{name}.parquet", **FEW | {"batch": 7})
    assert pq.read_table(tmp_path / "f.parquet").equals(pq.read_table(tmp_path / "c.parquet"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a circle of links", {"data": "loop"}),
        ("a NUL", {"data": "a\0b"}),
        ("nobody's home", {"data": "~nobody-at-all/x"}),
        ("no path", {"data": None}),
        ("a pipe", {"data": "pipe.csv"}),
        ("threads", {"threads": 100_000}),
        ("half a thread", {"threads": 1.5}),
        ("a yes for a number", {"batch": True}),
        ("a batch beyond all", {"batch": 10**30}),
        ("parts beyond all", {"part_rows": 10**30}),
        ("a number for a column", {"id": 3}),
    ],
)
def test_odd_arguments(name: str, options: dict[str, Any], exported: Any, x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.csv")
    arguments: dict[str, Any] = {"data": "x.npy"} | options
    if isinstance(arguments["data"], str) and arguments["data"][0] != "~":
        arguments["data"] = str(tmp_path / arguments["data"])
    with pytest.raises(InputError):
        predict(exported["classifier"].onnx, out=tmp_path / "out.csv", **arguments)


def test_columns_of_one_name(exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("a,b,c,d,e,e\n1,2,3,4,5,6\n")
    arguments = ["predict", str(exported["classifier"].onnx), str(tmp_path / "x.csv"), "--out", str(tmp_path / "o.csv")]
    assert cli.main(arguments) == 1
    assert "x.csv has more than one column named 'e': rename them" in capsys.readouterr().err
    assert cli.main([*arguments, "--columns", "a,b,c,d"]) == 0
    assert cli.main([*arguments, "--columns", "a,b,c,d", "--id", "e", "--overwrite"]) == 1
