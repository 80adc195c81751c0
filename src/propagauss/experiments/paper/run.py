"""Running experiments unit by unit, and the report of all that is stored."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

from propagauss.experiments import html
from propagauss.experiments.files import write
from propagauss.experiments.paper.datasets import DataMissing
from propagauss.experiments.paper.experiment import Context, Experiment, Mode, Section
from propagauss.experiments.paper.names import NAMES, experiment
from propagauss.experiments.paper.store import Store, versions

INTRODUCTION = (
    "Each section is one experiment of the paper “Streamlining Prediction in Bayesian Deep Learning”. Numbers are from "
    "the runs stored beside this file; the paper's own stand in grey behind them, where it has one for the same cell. "
    "Scales are fitted on validation data only."
)


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


def section(name: str, results: Path, mode: Mode) -> Section | None:
    """What the stored records of an experiment show; None if there are none."""
    records = Store(results, name, mode).records()
    if not records:
        return None
    return experiment(name).section({key: record["results"] for key, record in records.items()})


def report(results: Path, mode: Mode, names: Iterable[str] = tuple(NAMES)) -> Path:
    """Write `report.html` (or `report-quick.html`) in the results folder, from all that is stored there."""
    parts, contents = [], []
    for name in names:
        found = section(name, results, mode)
        if found is None:
            continue
        one = experiment(name)
        seconds = sum(r.get("seconds", 0.0) for r in Store(results, name, mode).records().values())
        contents.append(f'<li><a href="#{name}">{escape(one.title)}</a></li>')
        parts.append(
            f'<h2 id="{name}">{escape(one.title)}</h2>'
            + html.paragraph(f"{one.source}. propagauss reproduce {name}; {seconds / 60:.1f} minutes.", soft=True)
            + html.bullets(found.readings)
            + found.body
        )
    packages = ", ".join(f"{package} {number}" for package, number in versions().items())
    body = (
        "<h1>The paper's experiments, reproduced</h1>"
        + html.paragraph(INTRODUCTION)
        + (html.paragraph("Quick run: small subsets; the numbers mean little.") if mode == "quick" else "")
        + f"<nav><ul>{''.join(contents)}</ul></nav>{''.join(parts)}"
        + html.paragraph(f"Report made with {packages}.", soft=True)
    )
    path = results / ("report.html" if mode == "full" else "report-quick.html")
    return write(path, html.page("propagauss: the paper's experiments", body))
