"""`propagauss predict` against a bare loop around ONNX Runtime: `python -m benchmarks.streaming`.

The loop reads, predicts and writes the same columns, and nothing else: no parts to go on from, no checks of values, no
checksums. Both run on one thread, in turn, in this process; ratios are of the processor time in pairs of runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from benchmarks.report import markdown_table
from propagauss.predict import predict
from propagauss.predict.plan import default_batch

CASES = {  # sizes of the layers, rows, and how the data lie
    "MLP 3-32-2": ((3, 32, 2), 1_000_000, ("parquet", "csv", "npy")),
    "MLP 64-128-10": ((64, 128, 10), 200_000, ("parquet", "parquet, lists", "npy")),
    "MLP 784-128-64-10": ((784, 128, 64, 10), 20_000, ("parquet, lists", "npy")),
}


def export(sizes: tuple[int, ...], path: Path) -> None:
    import itertools

    import torch
    from torch import nn

    import propagauss as pg

    torch.manual_seed(0)
    layers = [each for a, b in itertools.pairwise(sizes) for each in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-2) for n, p in model.named_parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pg.Classifier(pg.streamline(model, posterior, torch.zeros(2, sizes[0]))).export(path)


def write(values: np.ndarray, form: str, folder: Path) -> Path:
    path = folder / f"data.{form.partition(',')[0]}"
    if form == "npy":
        np.save(path, values)
        return path
    table = pa.table({f"x{i}": values[:, i] for i in range(values.shape[1])})
    if "lists" in form:
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values.reshape(-1), values.shape[1])})
    (csv.write_csv if form == "csv" else pq.write_table)(table, path)
    return path


def read(path: Path, batch: int) -> Iterator[np.ndarray]:
    """As one would write it by hand."""
    if path.suffix == ".npy":
        values = np.load(path, mmap_mode="r")
        yield from (np.ascontiguousarray(values[i : i + batch]) for i in range(0, len(values), batch))
        return
    rows = csv.open_csv(path) if path.suffix == ".csv" else pq.ParquetFile(path).iter_batches(batch)
    for found in rows:
        for start in range(0, len(found), batch):
            part = found.slice(start, batch)
            if pa.types.is_list(part.column(0).type) or pa.types.is_fixed_size_list(part.column(0).type):
                yield part.column(0).flatten().to_numpy().reshape(len(part), -1)
            else:
                yield np.stack([column.to_numpy() for column in part.columns], axis=1).astype(np.float32)


def bare(model: Path, data: Path, out: Path, batch: int) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options)
    writer, row = None, 0
    for x in read(data, batch):
        mean, variance, p = session.run(None, {"x": x})
        entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1)
        columns = {"row": np.arange(row, row + len(x)), "prediction": p.argmax(1).astype(np.int32), "entropy": entropy}
        for name, value in (("mean", mean), ("variance", variance), ("probability", p)):
            columns |= {f"{name}_{i}": value[:, i] for i in range(value.shape[1])}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(out, table.schema)
        writer.write_table(table)
        row += len(x)
    if writer:
        writer.close()


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(sizes: tuple[int, ...], rows: int, form: str, rounds: int) -> list[str]:
    """Rows a second of both, and the ratio in pairs: median, smallest and largest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, out = folder / "m.onnx", folder / "out.parquet"
        export(sizes, model)
        values = np.random.default_rng(0).normal(size=(rows, sizes[0])).astype(np.float32)
        data, batch = write(values, form, folder), default_batch(4 * sizes[0])
        pairs = []
        for _ in range(rounds + 1):
            loop = seconds(lambda: bare(model, data, folder / "bare.parquet", batch))
            ours = seconds(lambda: predict(model, data, out, overwrite=True, threads=1, progress=False))
            pairs.append((loop, ours))
        same = pq.read_table(out).column_names == pq.read_table(folder / "bare.parquet").column_names
        assert same, "the columns differ"
    ratios = sorted(loop / ours for loop, ours in pairs[1:])  # the first round warms up
    loop, ours = (statistics.median(each[i] for each in pairs[1:]) for i in (0, 1))
    found = [f"{rows / loop:,.0f}", f"{rows / ours:,.0f}", f"{statistics.median(ratios):.2f}"]
    return [*found, f"{ratios[0]:.2f} to {ratios[-1]:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=float, default=1.0, help="so many times the rows")
    args = parser.parse_args()
    found = [
        [name, form, *measured(sizes, int(rows * args.rows), form, args.rounds)]
        for name, (sizes, rows, forms) in CASES.items()
        for form in forms
    ]
    heads = ["model", "data", "bare loop, rows/s", "predict, rows/s", "ratio", "range"]
    print(markdown_table(heads, found))


if __name__ == "__main__":
    main()
