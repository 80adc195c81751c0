"""Reading: any range of rows, exactly, and never much of the data at once."""

from __future__ import annotations

import csv
import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv

from propagauss.errors import InputError
from propagauss.predict import predict
from propagauss.predict.plan import consecutive, divide, joined
from propagauss.predict.reading import csv_file
from propagauss.predict.reading.data import cut, reader
from propagauss.predict.reading.rows import Columns, Piece

FLOAT = np.dtype(np.float64)


def rows_of(paths: list[Path], parts: Any, columns: Columns) -> list[tuple[float, str]]:
    found = []
    for segment in joined(parts):
        for piece in reader(paths[segment.file]).read(paths[segment.file], segment, columns, 3):
            assert piece.ids is not None
            found += zip(piece.values[:, 0].tolist(), piece.ids.to_pylist(), strict=True)
    return found


text = st.text(st.sampled_from('ab",\n\r é'), max_size=6).filter(lambda t: t.replace("\r", "") == t)


@settings(deadline=None)
@given(
    files=st.lists(st.lists(st.tuples(st.integers(0, 99), text), max_size=7), min_size=1, max_size=3),
    ends=st.sampled_from(["\n", "\r\n"]),
    blank=st.booleans(),
    last=st.booleans(),
    bom=st.booleans(),
    part_rows=st.integers(1, 5),
    block=st.sampled_from([7, 1 << 16]),
)
def test_csv_is_cut_between_rows(files, ends, blank, last, bom, part_rows, block, tmp_path_factory) -> None:
    """Quoted commas, quotes and line ends, empty lines, either line end, none at the end."""
    folder, paths = tmp_path_factory.mktemp("csv"), []
    for i, rows in enumerate(files):
        stream = io.StringIO(newline="")
        csv.writer(stream, lineterminator=ends + ends * blank).writerows([("n", "t, 1"), *rows])
        written = stream.getvalue() if last else stream.getvalue().rstrip("\r\n")
        paths.append(folder / f"{i}.csv")
        paths[-1].write_bytes(written.encode("utf-8-sig" if bom else "utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_file, "HEAD", max(block, 64))
        parts = divide(paths, part_rows)
    expected = [(float(n), t) for rows in files for n, t in rows]
    columns = Columns(("n",), (1,), "t, 1", FLOAT)
    assert [part.rows for part in parts[:-1]] == [part_rows] * (len(parts) - 1)
    assert rows_of(paths, parts, columns) == expected
    for part in parts:
        assert rows_of(paths, [part], columns) == expected[part.start : part.start + part.rows]


def test_csv_with_a_quote_that_does_not_close(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text('n,t\n1,a\n2,"b\n3,c\n')
    with pytest.raises(InputError, match="quote opens and does not close"):
        divide([path], 2)
    path.write_text('n,t\n1,a\n2,5" b\n3,c\n4,6" d\n5,e\n')  # not quoted fields: Arrow takes them as they are
    parts = divide([path], 2)
    with pytest.raises(InputError, match="read as"):
        rows_of([path], parts, Columns(("n",), (1,), "t", FLOAT))


def test_parquet_from_any_row(tmp_path: Path) -> None:
    rng, paths = np.random.default_rng(0), []
    for i, (rows, group) in enumerate([(11, 4), (0, 1), (1, 1), (20, 20)]):
        paths.append(tmp_path / f"{i}.parquet")
        start = 100 * i
        table = pa.table({"n": np.arange(start, start + rows), "t": [str(n) for n in range(rows)]})
        pq.write_table(table, paths[-1], row_group_size=group)
    everything = [(float(100 * i + n), str(n)) for i, rows in enumerate((11, 0, 1, 20)) for n in range(rows)]
    columns = Columns(("n",), (1,), "t", FLOAT)
    for part_rows in (1, 3, 5, 50):
        parts = divide(paths, part_rows)
        chosen = [part for part in parts if rng.random() < 0.6]
        for run in consecutive(chosen, most=4):
            expected = everything[run[0].start : run[-1].start + run[-1].rows]
            assert rows_of(paths, run, columns) == expected
    assert rows_of(paths, divide(paths, 7), columns) == everything


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.data())
def test_cut(lengths: list[int], data: Any) -> None:
    total = sum(lengths)
    pieces = [Piece(np.full((n, 1), i), pa.array([i] * n, pa.int64())) for i, n in enumerate(lengths)]
    sizes = []
    while sum(sizes) < total:
        sizes.append(data.draw(st.integers(1, total - sum(sizes))))
    found = list(cut(pieces, sizes))
    assert [len(piece.values) for piece in found] == sizes
    expected = [i for i, n in enumerate(lengths) for _ in range(n)]
    assert [int(v) for piece in found for v in piece.values[:, 0]] == expected
    assert [v for piece in found if piece.ids is not None for v in piece.ids.to_pylist()] == expected
    with pytest.raises(InputError, match="fewer rows"):
        list(cut(pieces, [total + 1]))


def save(path: Path, values: np.ndarray) -> None:
    if path.suffix == ".npy":
        np.save(path, values)
        return
    table = pa.table({name: values[:, i] for i, name in enumerate("abcd")})
    if path.suffix == ".csv":
        arrow_csv.write_csv(table, path)
    else:
        pq.write_table(table, path, row_group_size=len(values), compression="none", use_dictionary=False)


def peak(model: Path, data: Path, out: Path) -> int:
    """Most bytes held at a time by Arrow and by Python."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        predict(model, data, out, progress=False, threads=1, part_rows=16_384)
        return (pool.max_memory() or 0) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


@pytest.mark.parametrize("kind", ["parquet", "csv", "npy"])
def test_memory_is_bounded(kind: str, exported: Any, tmp_path: Path) -> None:
    """Four times the rows need no more of it; a Parquet file even in one row group."""
    values = np.random.default_rng(0).normal(size=(100_000, 4)).astype(np.float32)
    peaks = []
    for name, rows in (("small", values), ("large", np.tile(values, (4, 1)))):
        save(tmp_path / f"{name}.{kind}", rows)
        peaks.append(peak(exported["classifier"].onnx, tmp_path / f"{name}.{kind}", tmp_path / f"{name}-out.parquet"))
    assert peaks[1] < 1.2 * peaks[0]
