"""Numbers within the sentences of a page, from stored results; in the page each stands between marks with its name.

`<!-- number: uses-plain -->6 of 27<!-- /number -->`

A mark must not begin a line: Markdown would take the line for HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from experiments.frame.experiment import Record
from experiments.frame.store import Store
from experiments.published import valla as published
from experiments.selective.methods import ENSEMBLE, FITTED, MEAN, PLAIN
from experiments.selective.report import ENGINES, Rows, by_set
from experiments.valla.readings import EXACT
from experiments.valla.summary import Summary, cost, summaries
from experiments.valla.ways import BATCH
from propagauss.demo.compute import Settings
from propagauss.demo.opening import compute

MARKED = re.compile(r"(<!-- number: ([\w-]+) -->)(.*?)(<!-- /number -->)", re.DOTALL)
ERRORS = 2.0  # standard errors that count as a difference


def filled(text: str, results: Path) -> str:
    """The page with every number in it as the results have it."""
    return MARKED.sub(lambda found: found[1] + number(found[2], results) + found[4], text)


def number(name: str, results: Path) -> str:
    if name not in NUMBERS:
        raise SystemExit(f"no number is called '{name}'; there are {', '.join(NUMBERS)}")
    return NUMBERS[name](results)


def shown(text: str) -> dict[str, str]:
    """Names and numbers that stand in a page."""
    return {found[2]: found[3] for found in MARKED.finditer(text)}


# -- where they come from


def inside(results: Path) -> str:
    """Of new observations, within the intervals of the demo's first picture."""
    settings = Settings()
    return f"{compute(settings.seed, settings.opening_steps).inside:.1%}"


def _records(results: Path, name: str) -> list[Record]:
    return [record["results"] for record in Store(results, name, "full").records().values()]


def plain_won(results: Path) -> str:
    """Runs of `tune` that chose a model without a posterior."""
    runs = _records(results, "uses")
    return f"{sum(r['winner']['engine'] == 'plain' for r in runs)} of {len(runs)}"


def tuned(sign: int) -> Callable[[Path], str]:
    """Runs of `tune` that are worse (1) or better (-1) than the plain model on test data."""

    def count(results: Path) -> str:
        gaps = [r["difference"] for r in _records(results, "uses")]
        return f"{sum(sign * mean > ERRORS * error and abs(mean) > 1e-12 for mean, error in gaps)} of {len(gaps)}"

    return count


def _valla(results: Path, name: str) -> Summary:
    records = Store(results, "valla", "full").records()
    return summaries({key: record["results"] for key, record in records.items()})[name]


def exact_cost(results: Path) -> str:
    """Passes of the linearised network with a Kronecker posterior over all weights."""
    times = Store(results, "valla", "full").records()["cost"]["results"]
    return f"{cost(times, EXACT, BATCH):.1f}"


def auroc(name: str) -> Callable[[Path], str]:
    """By the variance of the logits, and the best that is published, which is by the entropy."""

    def pair(results: Path) -> str:
        best = max(cell["entropy"] for cell in published.NUMBERS[name].values())
        return f"{_valla(results, name).mean(EXACT, 'variance'):.3f} (published, by the entropy: at most {best:.3f})"

    return pair


def against_temperature(name: str) -> Callable[[Path], str]:
    return lambda results: _valla(results, name).difference(EXACT)


def _selective(results: Path) -> dict[str, Rows]:
    return by_set({key: r["results"] for key, r in Store(results, "selective", "full").records().items()})


def ensemble_best(results: Path) -> str:
    """Sets of selective prediction on which the ensemble has a lower AURC than both engines, calibrated."""
    known, best = _selective(results), 0
    for rows in known.values():
        engines = [n for n in rows.names if rows.first(n)["method"] in ENGINES and rows.first(n)["form"] == FITTED]
        best += rows.aurc(ENSEMBLE)[0] < min(rows.aurc(n)[0] for n in engines)
    return f"{best} of {len(known)}"


def cifar_accuracy(method: str) -> Callable[[Path], str]:
    return lambda results: f"{_selective(results)['cifar10'].mean(method, 'accuracy'):.0%}"


NUMBERS: dict[str, Callable[[Path], str]] = {
    "opening-inside": inside,
    "uses-plain": plain_won,
    "uses-worse": tuned(1),
    "uses-better": tuned(-1),
    "ensemble-best": ensemble_best,
    "cifar-plain": cifar_accuracy(PLAIN),
    "cifar-ivon": cifar_accuracy(f"IVON, {MEAN}"),
    "valla-cost": exact_cost,
    "valla-auroc-mnist": auroc("mnist"),
    "valla-auroc-fashion": auroc("fashion_mnist"),
    "valla-nll-mnist": against_temperature("mnist"),
    "valla-nll-fashion": against_temperature("fashion_mnist"),
}
