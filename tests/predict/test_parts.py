"""The folder of parts: only our own files are removed, every part is the one it claims to be, and a finished run is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from predict.disk import full_disk
from propagauss import cli
from propagauss.errors import InputError
from propagauss.predict import predict
from propagauss.predict.reading import npy_file

FEW = {"part_rows": 100, "batch": 40, "threads": 1, "progress": False}


@pytest.fixture
def job(exported: Any, table: Any, tmp_path: Path) -> dict[str, Path]:
    pq.write_table(table, tmp_path / "data.parquet")
    return {"model": exported["classifier"].onnx, "data": tmp_path / "data.parquet", "out": tmp_path / "out.parquet"}


@pytest.fixture
def expected(job: dict[str, Path], tmp_path: Path) -> Any:
    predict(**job | {"out": tmp_path / "expected.parquet"}, **FEW)
    return pq.read_table(tmp_path / "expected.parquet")


def interrupted(job: dict[str, Path], tmp_path: Path) -> Path:
    with full_disk(6), pytest.raises(OSError, match="5 of"):
        predict(**job, **FEW)
    return tmp_path / ".out.parquet.parts"


def test_files_of_others_are_left(job: dict[str, Path], expected: Any, tmp_path: Path) -> None:
    folder = tmp_path / ".out.parquet.parts"
    (folder / "mine").mkdir(parents=True)
    (tmp_path / "kept.txt").write_text("mine")
    for name in ("thesis.tex", "part.arrow", ".hidden.tmp", "mine/x"):
        (folder / name).write_text("mine")
    (folder / "link").symlink_to(tmp_path / "kept.txt")
    predict(**job, **FEW)
    assert pq.read_table(job["out"]).equals(expected)
    assert {path.name for path in folder.iterdir()} == {"thesis.tex", "part.arrow", ".hidden.tmp", "mine", "link"}
    assert (folder / "thesis.tex").read_text() == (tmp_path / "kept.txt").read_text() == "mine"


def test_restart_leaves_files_of_others(job: dict[str, Path], expected: Any, tmp_path: Path) -> None:
    folder = interrupted(job, tmp_path)
    (folder / "thesis.tex").write_text("mine")
    predict(**job, restart=True, **FEW)
    assert pq.read_table(job["out"]).equals(expected)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("what", ["folder", "lock"])
def test_links_are_refused(what: str, job: dict[str, Path], tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / ".out.parquet.parts"
    victim.mkdir()
    (victim / "lock").write_text("mine")
    if what == "folder":
        folder.symlink_to(victim, target_is_directory=True)
    else:
        folder.mkdir()
        (folder / "lock").symlink_to(victim / "lock")
    for options in ({}, {"restart": True}, {"overwrite": True}):
        with pytest.raises(InputError, match="is a link: remove it"):
            predict(**job, **options, **FEW)
    assert (victim / "lock").read_text() == "mine" and not job["out"].exists()


@pytest.mark.parametrize("name", ["manifest.json", "written.json", "lock", "output", "note"])
def test_what_has_a_name_of_ours_and_is_no_file(name: str, job: dict[str, Path], tmp_path: Path) -> None:
    """A link would be replaced, and a folder stop the run in the end."""
    folder = tmp_path / ".out.parquet.parts"
    (folder / name).mkdir(parents=True)
    with pytest.raises(InputError, match=f"{name} is a folder: remove it"):
        predict(**job, restart=True, **FEW)
    (folder / name).rmdir()
    (folder / name).symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match=f"{name} is a link: remove it"):
        predict(**job, **FEW)
    assert [path.name for path in folder.iterdir()] == [name] and not job["out"].exists()


def test_a_file_in_place_of_the_folder(job: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / ".out.parquet.parts").write_text("mine")
    with pytest.raises(InputError, match="is not a folder"):
        predict(**job, **FEW)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrow"))


def swap(folder: Path) -> None:
    """The contents of two parts."""
    first, second, *_ = parts(folder)
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


def renumber(folder: Path) -> None:
    """Each with the checksum it has, as the other one."""
    first, second, *_ = parts(folder)
    names = [path.name.split("-") for path in (first, second)]
    first.rename(folder / "x")
    second.rename(folder / "-".join([*names[0][:3], names[1][3]]))
    (folder / "x").rename(folder / "-".join([*names[1][:3], names[0][3]]))


def change(folder: Path) -> None:
    """A bit of a prediction."""
    first = parts(folder)[0]
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)


def repeat(folder: Path) -> None:
    """One part in place of another."""
    first, second, *_ = parts(folder)
    second.write_bytes(first.read_bytes())


@pytest.mark.parametrize("damage", [swap, renumber, change, repeat])
def test_parts_are_what_they_claim(damage: Any, job: dict[str, Path], expected: Any, tmp_path: Path) -> None:
    damage(interrupted(job, tmp_path))
    assert predict(**job, **FEW).resumed in (300, 400)
    assert pq.read_table(job["out"]).equals(expected)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"identity": 3}',
        b"[" * 100_000,
        b"\xff",
        b'{"identity": {}, "on_nan": "error", "parts": 1}',
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "written.json"])
def test_damaged_notes(name: str, content: bytes, job: dict[str, Path], expected: Any, tmp_path: Path) -> None:
    folder = interrupted(job, tmp_path)
    (folder / name).write_bytes(content)
    if name == "manifest.json":
        with pytest.raises(InputError, match=r"manifest of an unfinished run .* is damaged: discard it with --restart"):
            predict(**job, **FEW)
        predict(**job, restart=True, **FEW)
    else:
        predict(**job, **FEW)
    assert pq.read_table(job["out"]).equals(expected)


def test_manifest_with_strange_parts(job: dict[str, Path], tmp_path: Path) -> None:
    folder = interrupted(job, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"parts": [{"index": 0}]}))
    with pytest.raises(InputError, match="is damaged"):
        predict(**job, **FEW)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_finished_run_is_complete(
    ending: str, job: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"out.{ending}"
    arguments = ["predict", str(job["model"]), str(job["data"]), "--out", str(out), "--threads", "1"]
    assert cli.main(arguments) == 0
    before = (out.read_bytes(), out.stat().st_mtime_ns)
    capsys.readouterr()
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"{out}: 1,000 rows, 0 skipped; complete already, nothing to do")
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before
    for other in (["--on-nan", "skip"], ["--part-rows", "10"], ["--columns", "b,a,c,d"], ["--restart"]):
        assert cli.main([*arguments, *other]) == 1  # not the same
    assert cli.main([*arguments, "--overwrite"]) == 0
    out.write_bytes(before[0][:-1])
    assert cli.main(arguments) == 1
    os.utime(job["data"], ns=(0, 0))
    assert cli.main(arguments) == 1
    assert "exists: give another output" in capsys.readouterr().err


def test_outputs_of_others_are_not_taken_for_ours(job: dict[str, Path]) -> None:
    for note in (b"", b"{}", b'{"key": 1}', b'{"key": "", "on_nan": "error", "summary": {}}'):
        pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({b"propagauss": note}), job["out"])
        with pytest.raises(InputError, match="exists: give another output"):
            predict(**job, **FEW)


@pytest.mark.parametrize("policy", ["error", "skip", "keep"])
@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_predictions_that_are_not_finite(policy: str, form: str, exported: Any, x: np.ndarray, tmp_path: Path) -> None:
    """Inputs are finite, but too large for the network: no class is made up."""
    values = x.copy()
    values[[7, 950]] = 1e25
    values[8] = np.nan
    np.save(tmp_path / "x.npy", values)
    call = (getattr(exported["classifier"], form), tmp_path / "x.npy", tmp_path / "out.parquet")
    if policy == "error":
        np.save(tmp_path / "x.npy", np.delete(values, 8, axis=0))
        with pytest.raises(
            InputError, match=r"row 7: what the model returns as '\w+' is not finite \(entry 0, .* 1e\+25"
        ):
            predict(*call, on_nan=policy, **FEW)
        assert not call[2].exists()
        return
    summary = predict(*call, on_nan=policy, **FEW)
    found = pq.read_table(call[2]).to_pandas()
    if policy == "skip":
        assert (summary.rows, summary.skipped, summary.without) == (997, 3, 0)
        assert not {7, 8, 950} & set(found["row"]) and np.isfinite(found.to_numpy()).all()
    else:
        assert (summary.rows, summary.skipped, summary.without) == (1000, 0, 3)
        assert "3 without a prediction" in str(summary)
        assert found.loc[[7, 8, 950], found.columns[1:]].isna().to_numpy().all()
        assert np.isfinite(found.drop([7, 8, 950]).to_numpy()).all()


def test_array_cut_short_while_it_is_read(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file would end the process here."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((100_000, 4), np.float32))
    real = npy_file._rows

    def rows(*args: Any) -> np.ndarray:
        os.truncate(path, 4096)
        return real(*args)

    monkeypatch.setattr(npy_file, "_rows", rows)
    with pytest.raises(InputError, match="cut short while it was read"):
        predict(exported["classifier"].onnx, path, tmp_path / "out.csv", progress=False, threads=1)


NPY = b"\x93NUMPY\x01\x00v\x00"
HEADER = b"{'descr': %s, 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NPY + (HEADER % (b"'<f4'", b"(-5, 4)")).ljust(117) + b"\n", "cut short"),
        (NPY + (HEADER % (b"'<f4'", b"(10**9, 4)")).ljust(117) + b"\n", "cannot be read|cut short"),
        (NPY + (HEADER % (b"__import__('os').getcwd()", b"(5, 4)")).ljust(117) + b"\n", "cannot be read"),
        (NPY + (HEADER % (b"'|O'", b"(5, 4)")).ljust(117) + b"\n" + bytes(160), "must hold numbers"),
        (NPY[:6] + b"\x09\x00", "its version"),
        (NPY[:6] + b"\x02\x00" + b"\xff" * 4, "cannot be read"),
        (b"PK\x03\x04" + bytes(100), "it is an .npz file: save one array"),
    ],
)
def test_odd_arrays(content: bytes, message: str, exported: Any, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(InputError, match=message):
        predict(exported["classifier"].onnx, tmp_path / "x.npy", tmp_path / "out.csv", **FEW)


def test_ids_that_are_bytes(exported: Any, table: Any, tmp_path: Path) -> None:
    ids = pa.array([bytes([i % 256, 255]) for i in range(1000)])
    pq.write_table(table.append_column("raw", ids), tmp_path / "data.parquet")
    call = (exported["classifier"].onnx, tmp_path / "data.parquet")
    with pytest.raises(InputError, match=r"column 'raw' holds bytes, which out\.csv cannot: write \.parquet"):
        predict(*call, tmp_path / "out.csv", id="raw", **FEW)
    predict(*call, tmp_path / "out.parquet", id="raw", **FEW)
    assert pq.read_table(tmp_path / "out.parquet")["raw"].to_pylist() == ids.to_pylist()


@pytest.mark.parametrize("before", [0, 3000])
def test_long_fields_of_csv(before: int, exported: Any, tmp_path: Path) -> None:
    path, out = tmp_path / "x.csv", tmp_path / "out.parquet"
    options: dict[str, Any] = {"columns": list("abcd"), "id": "t", "progress": False, "threads": 1}
    rows = "1,2,3,4,short\n" * before
    path.write_text(f"a,b,c,d,t\n{rows}1,2,3,4,{'x' * 5_000_000}\n1,2,3,4,y\n")
    with pytest.raises(InputError, match="is longer than 4,194,304 bytes"):
        predict(exported["classifier"].onnx, path, out, **options)
    path.write_text(f"a,b,c,d,t\n{rows}1,2,3,4,{'x' * 4_000_000}\n1,2,3,4,y\n")
    predict(exported["classifier"].onnx, path, out, **options)
    assert [len(text) for text in pq.read_table(out)["t"].to_pylist()[before:]] == [4_000_000, 1]
