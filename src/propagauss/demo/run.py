"""`propagauss demo`: compute everything, print the tables, write the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from propagauss.demo.compute import STEPS, Settings, compute
from propagauss.demo.report import tables
from propagauss.demo.report.page import write

BAR = "{desc:<32} {bar} {n}/{total}"


def run(out: Path, seed: int = 0, quick: bool = False) -> Path:
    """Compute everything, print the tables, write `report.html` and `results.json` into `out`; returns the report."""
    out.mkdir(parents=True, exist_ok=True)  # before the work, so that a bad path costs nothing
    settings = Settings.of(seed, quick)
    with (
        _one_thread(),
        tqdm(desc="demo", total=STEPS, disable=None, leave=False, bar_format=BAR) as bar,
    ):

        def step(what: str) -> None:
            bar.set_description_str(what)
            bar.update()

        demo = compute(settings, step)
    for title, study, columns in (
        ("digits", demo.digits, tables.CLASSIFICATION),
        ("diabetes", demo.diabetes, tables.REGRESSION),
    ):
        print(f"\n{title}: {tables.describe(study.sizes, study.parameters, study.split.sizes)}\n")
        print(tables.text(study.results, columns))
    print(f"\n{tables.LEGEND}\n")
    return write(demo, out)


@contextmanager
def _one_thread() -> Iterator[None]:
    """These networks are too small for more: threads that wait for one another would only add noise to the timing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
