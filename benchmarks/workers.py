"""How predictions scale with workers: exported predictors in ONNX Runtime, one thread each, in 1, 2, ... processes.

    python -m benchmarks.workers                                      # prints a table
    python -m benchmarks.workers --json benchmarks/results.json       # and stores it there, for the documentation

Every process loads the file, waits for the others, and predicts for some seconds. Rounds with different numbers of
processes alternate, so that a machine that changes speed changes all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import markdown_table, number
from benchmarks.results import store

HEADER = ("model", "batch", "processes", "predictions per second", "over one process")


def serve(path: str, shape: tuple[int, ...], seconds: float, barrier: Any, counts: Any) -> None:
    """One worker: puts the predictions per second that it made into `counts`."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    feed = {session.get_inputs()[0].name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    for _ in range(3):
        session.run(None, feed)
    barrier.wait()
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        session.run(None, feed)
        calls += 1
    counts.put(calls * shape[0] / spent)


def throughput(path: Path, shape: tuple[int, ...], processes: int, seconds: float) -> float:
    """Predictions per second of all processes together."""
    context = multiprocessing.get_context("spawn")
    barrier, counts = context.Barrier(processes), context.Queue()
    arguments = (str(path), shape, seconds, barrier, counts)
    workers = [context.Process(target=serve, args=arguments) for _ in range(processes)]
    for worker in workers:
        worker.start()
    found = [counts.get(timeout=60 + 10 * seconds) for _ in workers]
    for worker in workers:
        worker.join()
    return sum(found)


def exported(folder: Path) -> list[tuple[str, Path, tuple[int, ...]]]:
    """Title, file and input shape of each predictor."""
    import torch

    from benchmarks import cnn, mlp
    from benchmarks.onnx_runtime import write_plain
    from propagauss import Classifier

    torch.set_num_threads(1)
    nets = [
        ("MLP", mlp.trained(mlp.SIZES), mlp.streamlined(mlp.SIZES, "diagonal", "diagonal"), mlp.inputs(mlp.SIZES, 64)),
        ("ResNet-18", cnn.model(), cnn.exact(), cnn.inputs(cnn.BATCH)),
    ]
    found = []
    with torch.no_grad():
        for name, model, net, x in nets:
            files = {f"{name}, plain": folder / f"{name}-plain.onnx", f"{name}, streamlined": folder / f"{name}.onnx"}
            plain, ours = files.values()
            write_plain(model, x, plain)
            Classifier(net).export(ours)
            found += [(title, path, tuple(x.shape)) for title, path in files.items()]
    return found


def measured(processes: list[int], seconds: float, rounds: int) -> list[dict[str, Any]]:
    from tqdm import tqdm

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = exported(Path(folder))
        bar = tqdm(total=len(files) * rounds * len(processes), desc="workers", disable=None)
        for title, path, shape in files:
            rates: dict[int, list[float]] = {count: [] for count in processes}
            for _ in range(rounds):
                for count in processes:
                    rates[count].append(throughput(path, shape, count, seconds))
                    bar.update()
            for count, values in rates.items():
                speedup = median(v / one for v, one in zip(values, rates[processes[0]], strict=True))
                rate = median(values)
                row = {"model": title, "batch": shape[0], "processes": count, "per_second": rate, "speedup": speedup}
                rows.append(row)
        bar.close()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    cells: list[Callable[[dict[str, Any]], str]] = [
        lambda r: r["model"],
        lambda r: str(r["batch"]),
        lambda r: str(r["processes"]),
        lambda r: f"{r['per_second']:,.0f}",
        lambda r: f"{number(r['speedup'])}x",
    ]
    return markdown_table(HEADER, [[cell(row) for cell in cells] for row in rows])


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser("python -m benchmarks.workers", description="Predictions per second by workers.")
    cores = os.cpu_count() or 1
    parser.add_argument("--processes", type=int, nargs="+", default=sorted({1, cores}), help="the first is the measure")
    parser.add_argument("--seconds", type=float, default=5.0, help="per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path, help="store the numbers in this report")
    args = parser.parse_args()
    rows = measured(args.processes, args.seconds, args.rounds)
    print(table(rows))
    if args.json:
        load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
        store(args.json, workers={"cores": cores, "load": load, "seconds": args.seconds, "rows": rows})


if __name__ == "__main__":
    main()
