"""Measures all cases that have no record yet, and writes the tables.

PYTHONPATH=tests python -m fidelity                              # print
PYTHONPATH=tests python -m fidelity --write docs/fidelity.md     # into the page
PYTHONPATH=tests python -m fidelity --again                      # forget the records
PYTHONPATH=tests python -m fidelity --figure docs/images/fidelity.svg     # only the figure, some of the cases
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from fidelity import figure
from fidelity.cases import LAPLACE, OWN_SCALE, Case
from fidelity.measure import SAMPLES, measure

RECORDS = Path(__file__).parents[2] / "results" / "cache" / "fidelity.json"
WORDS = {
    "diagonal": "streamlined, diagonal",
    "moments": "streamlined, moments",
    "full": "streamlined, full",
    "linearised": "linearised",
}
CHANCE = 1 / math.sqrt(math.pi * SAMPLES)  # the mean error of a right answer, from that of the samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page that holds the marks of the tables")
    parser.add_argument("--again", action="store_true", help="measure everything, whatever has a record")
    parser.add_argument("--figure", type=Path, help="draw standard deviations of each input, and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.figure is not None:
        args.figure.write_text(figure.draw(figure.points()) + "\n", encoding="utf-8")
        return
    if args.again:
        RECORDS.unlink(missing_ok=True)
    records = measured()
    tables = {"laplace": narrow_table(records), "own-scale": wide_table(records)}
    for name, table in tables.items():
        if args.write is None:
            print(f"{name}\n{table}\n")
        else:
            put(args.write, name, table)


def measured() -> dict[str, Any]:
    """All records; each is stored when it is there."""
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    for case in (*OWN_SCALE, *LAPLACE):
        if case.key not in records:
            start = time.perf_counter()
            records[case.key] = measure(case)
            store(records)
            print(f"{case.key}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return records


def store(records: dict[str, Any]) -> None:
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    temporary = RECORDS.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(records, indent=1))
    os.replace(temporary, RECORDS)


# -- the tables


def narrow_table(records: dict[str, Any]) -> str:
    """Sd ratio and rank correlation of each engine, with the rank correlation of two halves of the samples."""
    engines = ("diagonal", "full", "linearised")
    header = ["network", "posterior", "parameters", "accuracy", "two halves", *(WORDS[e] for e in engines)]
    lines = [header, ["---"] * 2 + ["--:"] * (len(header) - 2)]
    for case in LAPLACE:
        record = records[case.key]
        lines.append([*_start(case, record), *(_pair(record["readings"].get(e)) for e in engines)])
    return _joined(lines)


def wide_table(records: dict[str, Any]) -> str:
    """The same with the mean error, and which engine is nearest."""
    engines = ("diagonal", "moments", "full", "linearised")
    header = ["network", "posterior", "parameters", "accuracy", "two halves", *(WORDS[e] for e in engines), "nearest"]
    lines = [header, ["---"] * 2 + ["--:"] * (len(header) - 3) + ["---"]]
    for case in OWN_SCALE:
        record = records[case.key]
        readings = record["readings"]
        smallest = min(reading[2] for reading in readings.values())
        nearest = [WORDS[e] for e in engines if e in readings and readings[e][2] < smallest + CHANCE]
        cells = [_triple(readings.get(e)) for e in engines]
        lines.append([*_start(case, record), *cells, " and ".join(nearest) if smallest < 1 else "none"])
    return _joined(lines)


def _start(case: Case, record: dict[str, Any]) -> list[str]:
    numbers = (f"{record['parameters']:,}", f"{record['accuracy']:.2f}", f"{record['halves']:.2f}")
    return [case.network, case.posterior, *numbers]


def _pair(reading: list[float] | None) -> str:
    return "–" if reading is None else f"{_ratio(reading[0])} / {reading[1]:.2f}"


def _triple(reading: list[float] | None) -> str:
    if reading is None:
        return "–"
    error = f"{reading[2]:.1%}" if reading[2] < 10 else f"{reading[2]:.0e} times"
    return f"{_pair(reading)} / {error}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0e}"


def _joined(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def put(page: Path, name: str, table: str) -> None:
    """Between the marks of its name."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, rest = page.read_text().split(start)
    page.write_text(f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
