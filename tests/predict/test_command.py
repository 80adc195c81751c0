"""`propagauss predict` on the command line."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from propagauss import cli


@pytest.fixture
def arguments(exported: Any, table: Any, tmp_path: Path) -> list[str]:
    pq.write_table(table, tmp_path / "data.parquet")
    return ["predict", str(exported["classifier"].onnx), str(tmp_path / "data.parquet"), "--threads", "1"]


def test_summary(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.parquet"
    options = ["--columns", "a, b,c,d", "--id", "key", "--batch", "64", "--part-rows", "200", "--on-nan", "skip"]
    assert cli.main([*arguments, "--out", str(out), *options]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "input: a, b, c, d"
    assert last.startswith(f"{out}: 1,000 rows, 0 skipped; ") and last.endswith(" rows/s")
    assert pq.read_table(out).column_names[0] == "key"


def test_errors_are_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, "--out", str(tmp_path / "out.parquet"), "--columns", "a,b,c"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("propagauss: ") and "--columns" in said


def test_full_disk(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    assert cli.main([*arguments, "--out", str(tmp_path / "out.parquet")]) == 1
    assert capsys.readouterr().err.startswith("propagauss: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["data.parquet"]


@pytest.mark.parametrize("wrong", [[], ["--out", "x.csv", "--batch", "0"], ["--out", "x.csv", "--on-nan", "drop"]])
def test_wrong_usage(wrong: list[str], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, *wrong]) == 2
    assert "usage: propagauss predict" in capsys.readouterr().err


def test_without_pyarrow(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.main([*arguments, "--out", "x.csv"]) == 2
    assert capsys.readouterr().err == "propagauss: `predict` needs pyarrow: pip install propagauss[predict]\n"


def test_progress_counts_rows(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from propagauss.predict import predict, run

    shown = []

    class Bar:
        def __init__(self, **options: Any):
            shown.append(options["total"])

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None: ...

        def update(self, rows: int) -> None:
            shown.append(rows)

    monkeypatch.setattr(run, "tqdm", Bar)
    np.save(tmp_path / "x.npy", np.zeros((250, 4)))
    predict(exported["classifier"].onnx, tmp_path / "x.npy", tmp_path / "out.csv", batch=60, part_rows=100)
    assert shown == [250, 60, 40, 60, 40, 50]
