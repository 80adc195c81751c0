"""Where memory goes: weights, what a predictor keeps, and the peak of a prediction, each in a process of its own.

    python -m benchmarks.footprint                                    # prints a table
    python -m benchmarks.footprint --json benchmarks/results.json     # and stores it there, for the documentation

A process builds its predictor, drops the model and the posterior, and predicts. *Resident* is what it then holds beyond
Python and its libraries, as the system counts it; *peak* is the most it held during predictions. Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

import propagauss as pg
from benchmarks import cnn, mlp, transformers
from benchmarks.case import Predict
from benchmarks.low_rank import TOLERANCE
from benchmarks.memory import tensor_bytes
from benchmarks.report import markdown_table, size
from benchmarks.results import ROOT, store

# tensors of a MiB or more go back to the system when they are freed; otherwise the peak is as much the allocator's
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
HEADER = ("model", "predictor", "weights", "kept", "resident", "peak")
PLAIN = "plain model"
LOW_RANK = f"streamlined, variance_tolerance={TOLERANCE}"


@dataclass(frozen=True)
class Setting:
    """One model and input, and the ways to predict that are measured on it."""

    title: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    predictors: dict[str, Callable[[], Predict]]


def _mlp(batch: int) -> Setting:
    own = lambda: (mlp.trained(mlp.SIZES), mlp.posterior(mlp.SIZES, "diagonal"))  # noqa: E731
    predictors: dict[str, Callable[[], Predict]] = {
        PLAIN: lambda: mlp.trained(mlp.SIZES),
        "streamlined": lambda: mlp.streamlined(mlp.SIZES, "diagonal", "diagonal"),
        "our GLM baseline": lambda: pg.baselines.GLM(*own()),
        f"our {mlp.SAMPLES} samples": lambda: pg.baselines.MonteCarlo(*own(), samples=mlp.SAMPLES),
    }
    title = f"{'-'.join(map(str, mlp.SIZES))} MLP, batch {batch}"
    return Setting(title, lambda: mlp.trained(mlp.SIZES), lambda: mlp.inputs(mlp.SIZES, batch), predictors)


def _resnet() -> Setting:
    predictors: dict[str, Callable[[], Predict]] = {
        PLAIN: cnn.model,
        "streamlined": cnn.exact,
        LOW_RANK: lambda: cnn.streamlined(("*",), TOLERANCE),
    }
    return Setting(f"ResNet-18, batch {cnn.BATCH}", cnn.model, lambda: cnn.inputs(cnn.BATCH), predictors)


def _vit() -> Setting:
    predictors: dict[str, Callable[[], Predict]] = {
        PLAIN: lambda: transformers.plain("vit"),
        "streamlined, values of the last two blocks and head": lambda: transformers.streamlined(
            "vit", transformers.VIT_VALUES
        ),
        "streamlined, all blocks": lambda: transformers.exact("vit"),
        f"{LOW_RANK}, all blocks": lambda: transformers.streamlined("vit", transformers.VIT_ALL, tolerance=TOLERANCE),
    }
    return Setting("ViT-base, 224 px, batch 1", lambda: transformers.model("vit"), transformers.image, predictors)


def settings() -> dict[str, Setting]:
    return {"mlp-64": _mlp(64), "resnet": _resnet(), "vit": _vit()}


# -- one process


def one(name: str, predictor: str) -> dict[str, Any]:
    """Measured in this process, which should be a fresh one."""
    torch.set_num_threads(1)
    setting = settings()[name]
    before = _status("VmRSS")
    x, weights = setting.inputs(), tensor_bytes(setting.model())
    with torch.no_grad():
        predict = setting.predictors[predictor]()
        _forget()
        kept, resident = _kept(predict, weights), _status("VmRSS") - before
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        for _ in range(2):
            predict(x)
    peak = _status("VmHWM") - before
    return {"weights": weights, "kept": kept, "resident": resident, "peak": peak}


def _kept(predict: Any, weights: int) -> int:
    """A network holds all it needs; a baseline, the model and the posterior; a plain model, itself."""
    own: pg.Posterior | None = getattr(predict, "posterior", None)
    if own is not None:
        return weights + sum(v.numel() * v.element_size() for v in map(own.variance, own.names))
    return tensor_bytes(predict) or weights


def _forget() -> None:
    """Drop the models and posteriors that only the caches hold, and give the memory back to the system."""
    for module in (mlp, cnn, transformers):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    gc.collect()
    CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


# -- all of them


def measured() -> list[dict[str, Any]]:
    wanted = [(name, predictor) for name, setting in settings().items() for predictor in setting.predictors]
    found = []
    for name, predictor in tqdm(wanted, desc="memory", disable=None):
        command = [sys.executable, "-m", "benchmarks.footprint", "--one", name, predictor]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | ALLOCATOR)
        if done.returncode:
            raise SystemExit(f"{name}, {predictor}: {done.stderr.strip()}")
        numbers = json.loads(done.stdout.splitlines()[-1])
        found.append({"model": settings()[name].title, "predictor": predictor} | numbers)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [(r["model"], r["predictor"], *(size(r[n]) for n in ("weights", "kept", "resident", "peak"))) for r in rows]
    return markdown_table(HEADER, lines, left=2)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser("python -m benchmarks.footprint", description="Where memory goes.")
    parser.add_argument("--json", metavar="FILE", type=Path, help="store the numbers in this report")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "PREDICTOR"), help="only this one, in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    rows = measured()
    print(table(rows))
    if args.json:
        store(args.json, memory=rows)


if __name__ == "__main__":
    main()
