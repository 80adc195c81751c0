"""What is stored of each experiment, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from experiments.datasets import DataMissing
from experiments.frame.experiment import Context
from experiments.frame.names import NAMES, experiment
from experiments.frame.store import Store

SHOWN = 4  # missing units that are named; of more, only their number


def status(context: Context, results: Path, names: Iterable[str] = tuple(NAMES)) -> str:
    """A line for each experiment: how many units are stored, and which are missing if the data folder tells."""
    lines = [(name, *_counts(name, context, results)) for name in names]
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "\n".join(f"  {n:<{widths[0]}}  {stored:>{widths[1]}}  {missing}".rstrip() for n, stored, missing in lines)


def _counts(name: str, context: Context, results: Path) -> tuple[str, str]:
    store = Store(results, name, context.mode)
    stored = f"{len(store.records())} stored"
    absent = [module for module in experiment(name).needs if find_spec(module) is None]
    if absent:
        return stored, f"needs {', '.join(absent)}"
    try:
        units = experiment(name).units(context)
    except DataMissing as error:
        return stored, f"the rest is not known: {error}" if context.data_folder else ""
    due = [unit.key for unit in units if not store.has(unit, context.seed)]
    if not due:
        return stored, "none missing"
    return stored, f"{len(due)} missing" + (f": {', '.join(due)}" if len(due) <= SHOWN else "")
