"""Stopped anywhere, by a kill or a full disk, the next run goes on: no row is lost or doubled, no output is half."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from predict.disk import full_disk
from propagauss.errors import InputError
from propagauss.predict import predict
from propagauss.predict.writing.store import Store

FEW = {"part_rows": 100, "batch": 40, "threads": 1, "progress": False}


@pytest.fixture
def data(table: Any, tmp_path: Path) -> Path:
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=170)
    return tmp_path / "data.parquet"


@pytest.fixture
def expected(exported: Any, data: Path, tmp_path: Path) -> Any:
    predict(exported["classifier"].onnx, data, tmp_path / "expected.parquet", **FEW)
    return pq.read_table(tmp_path / "expected.parquet")


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_killed_at_every_step(ending: str, exported: Any, table: Any, tmp_path: Path) -> None:
    """kill -9 before every step on the disk, in processes of their own."""
    values = table.to_pandas()
    values.loc[[3, 260, 999], "b"] = np.nan
    values.to_parquet(tmp_path / "data.parquet")
    script = Path(__file__).parent / "killing.py"
    model = exported["classifier"].onnx
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(tmp_path / "data.parquet"), str(tmp_path), ending],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    *killed, last = runs
    assert len(killed) > 20 and all(run["first"] == -9 for run in killed) and last["first"] == 0
    keys = [key for i, key in enumerate(table["key"].to_pylist()) if i not in (3, 260, 999)]
    reference = Path(last["out"]).read_bytes()
    read = pq.read_table if ending == "parquet" else csv.read_csv
    assert read(last["out"])["key"].to_pylist() == keys
    for run in runs:
        assert run["again"] == 0 and not run["left"], run
        assert Path(run["out"]).read_bytes() == reference
    kept = {"data.parquet", *(f"{i + 1}.{ending}" for i in range(len(runs)))}
    notes = {f".{i + 1}.csv.done" for i in range(len(runs))} if ending == "csv" else set()
    assert {path.name for path in tmp_path.iterdir()} == kept | notes


def test_full_disk(exported: Any, data: Path, expected: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    message = r"No space left.*4 of 10 parts are kept, run the same again"
    with full_disk(5), pytest.raises(OSError, match=message) as caught:  # after the manifest and 4 parts
        predict(exported["classifier"].onnx, data, out, **FEW)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(out)
    assert not out.exists() and not list(tmp_path.glob(".out.parquet.parts/.*.tmp"))
    with full_disk(6), pytest.raises(OSError, match="10 of 10 parts are kept"):  # the other parts, not the output
        predict(exported["classifier"].onnx, data, out, **FEW)
    assert not out.exists()
    summary = predict(exported["classifier"].onnx, data, out, **FEW)
    assert summary.resumed == summary.rows == 1000
    assert pq.read_table(out).equals(expected) and not (tmp_path / ".out.parquet.parts").exists()


def test_file_too_large(exported: Any, data: Path, expected: Any, tmp_path: Path) -> None:
    """A limit of the system, met while Arrow writes."""
    out = tmp_path / "out.csv"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a part fits, the output does not
    try:
        with pytest.raises(OSError, match="File too large; 10 of 10 parts are kept"):
            predict(exported["classifier"].onnx, data, out, **FEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not out.exists()
    predict(exported["classifier"].onnx, data, out, **FEW)
    assert csv.read_csv(out)["mean_1"].to_numpy() == pytest.approx(expected["mean_1"].to_numpy(), abs=1e-6)


def interrupted(model: Path, data: Path, out: Path, **options: Any) -> None:
    with full_disk(4), pytest.raises(OSError, match="3 of"):
        predict(model, data, out, **FEW | options)


def test_other_model_data_or_options(exported: Any, data: Path, expected: Any, table: Any, tmp_path: Path) -> None:
    model, out = exported["classifier"].onnx, tmp_path / "out.parquet"
    interrupted(model, data, out)
    with pytest.raises(InputError, match=r"was of another model: discard it with --restart"):
        predict(exported["classifier"].pt2, data, out, **FEW)
    with pytest.raises(InputError, match="another part rows"):
        predict(model, data, out, **FEW | {"part_rows": 50})
    with pytest.raises(InputError, match="another columns"):
        predict(model, data, out, id="key", **FEW)
    assert predict(model, data, out, **FEW | {"batch": 10}).resumed == 300  # only how, not what
    interrupted(model, data, tmp_path / "out2.parquet")
    pq.write_table(table.slice(0, 999), data)
    with pytest.raises(InputError, match="another data"):
        predict(model, data, tmp_path / "out2.parquet", **FEW)
    summary = predict(model, data, tmp_path / "out2.parquet", restart=True, **FEW)
    assert (summary.rows, summary.resumed) == (999, 0)
    assert pq.read_table(tmp_path / "out2.parquet").equals(expected.slice(0, 999))


def test_policy_for_bad_rows_may_be_chosen_later(exported: Any, table: Any, tmp_path: Path) -> None:
    values = table.to_pandas()
    values.loc[555, "c"] = np.inf
    data, out = tmp_path / "data.parquet", tmp_path / "out.parquet"
    values.to_parquet(data)
    model = exported["classifier"].onnx
    with pytest.raises(InputError, match="row 555, column 'c' is inf"):
        predict(model, data, out, **FEW)
    assert not out.exists()
    with full_disk(2), pytest.raises(OSError, match="6 of 10"):
        predict(model, data, out, on_nan="skip", **FEW)
    with pytest.raises(InputError, match="another on-nan"):
        predict(model, data, out, on_nan="keep", **FEW)
    summary = predict(model, data, out, on_nan="skip", **FEW)
    assert (summary.rows, summary.skipped, summary.resumed) == (999, 1, 600)
    assert pq.read_table(out)["row"].to_pylist() == [i for i in range(1000) if i != 555]


def test_damaged_part_is_made_again(exported: Any, data: Path, expected: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    interrupted(exported["classifier"].onnx, data, out)
    (first, *_) = sorted((tmp_path / ".out.parquet.parts").glob("*.arrow"))
    first.write_bytes(first.read_bytes()[:-100])
    assert predict(exported["classifier"].onnx, data, out, **FEW).resumed == 200
    assert pq.read_table(out).equals(expected)


def test_outputs_are_not_overwritten(exported: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    out.write_text("mine")
    with pytest.raises(InputError, match="exists: give another output, or --overwrite"):
        predict(exported["classifier"].onnx, data, out, **FEW)
    assert out.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == ["data.parquet", "out.parquet"]
    with full_disk(11), pytest.raises(OSError, match="10 of 10"):
        predict(exported["classifier"].onnx, data, out, overwrite=True, **FEW)
    assert out.read_text() == "mine"
    assert predict(exported["classifier"].onnx, data, out, overwrite=True, **FEW).rows == 1000
    assert pq.read_table(out).num_rows == 1000


def test_one_run_at_a_time(exported: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    with Store(tmp_path / ".out.parquet.parts").locked(), pytest.raises(InputError, match="another run is at work"):
        predict(exported["classifier"].onnx, data, out, **FEW)
    assert not (tmp_path / ".out.parquet.parts").exists()


def test_data_that_changes_meanwhile(exported: Any, data: Path, tmp_path: Path) -> None:
    real = os.fsync

    def fsync(handle: int) -> None:
        os.utime(data, ns=(0, 0))
        real(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(InputError, match="was changed while it was read"):
            predict(exported["classifier"].onnx, data, tmp_path / "out.parquet", **FEW)
    assert not (tmp_path / "out.parquet").exists()
