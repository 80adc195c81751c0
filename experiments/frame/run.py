"""Running experiments unit by unit, and the report after each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

from experiments.datasets import DataMissing
from experiments.frame.experiment import Context, Experiment, Mode
from experiments.frame.names import experiment
from experiments.frame.store import Store
from experiments.report.page import report


def reproduce(
    names: Sequence[str], mode: Mode, data: Path | None, results: Path, seed: int = 0, again: bool = False
) -> list[str]:
    """Run the experiments named and write the report; returns what could not be run, and why."""
    results.mkdir(parents=True, exist_ok=True)
    context, missing = Context(mode, seed, data, results / "cache"), []
    for name in names:
        absent = [module for module in experiment(name).needs if find_spec(module) is None]
        if absent:
            missing.append(f"{name}: needs {', '.join(absent)} (docs/experiments.md says how to install)")
            continue
        try:
            run(experiment(name), context, results, again)
        except DataMissing as error:
            missing.append(f"{name}: {error}")
        print(f"report: {report(results, mode)}")
    if not names:
        print(f"report: {report(results, mode)}")
    return missing


def run(one: Experiment, context: Context, results: Path, again: bool = False) -> int:
    """Run what is not stored yet; returns how many units were run. What a unit found is written as soon as it ends."""
    store, done = Store(results, one.name, context.mode), 0
    units = one.units(context)
    due = [u for u in units if again or not store.has(u, context.seed)]
    with tqdm(due, desc=one.name, disable=None) as progress:
        for unit in progress:
            progress.set_postfix_str(unit.key)
            start = time.perf_counter()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(context.seed)
                found = unit.run(context)
            store.put(unit, context.seed, time.perf_counter() - start, found)
            done += 1
    return done
