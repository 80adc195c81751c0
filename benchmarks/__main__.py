"""Command line of the benchmarks; the exit code is 0 whatever the numbers, since speed is not a test."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import cnn, growth, language, mlp, modes, onnx_runtime, report, transformers
from benchmarks.case import Case, Method
from benchmarks.harness import QUICK, Settings
from benchmarks.results import RESULTS, Report, compared, environment
from benchmarks.run import run

SUITES = {
    "mlp": mlp.cases,
    "cnn": cnn.cases,
    "transformers": transformers.cases,
    "language": language.cases,
    "onnx": onnx_runtime.cases,
    "growth": growth.cases,
    "modes": modes.cases,
}


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    if args.docs:
        _write_docs()
        return
    rows = chosen(args.only, args.batches)
    if args.list:
        print(*[f"{case.name}/{m.name}" for case, methods in rows for m in methods], sep="\n")
        return
    if not rows:
        raise SystemExit(f"nothing matches {args.only!r}; see --list")
    if args.json is not None and not args.json.parent.is_dir():
        raise SystemExit(f"no such directory: {args.json.parent}")
    _measure(rows, args.quick, args.json)


def _write_docs() -> None:
    from benchmarks import pages  # needs matplotlib

    if not RESULTS.exists():
        raise SystemExit(f"no {RESULTS}: run `python -m benchmarks --json {RESULTS}` first")
    print("rewrote", *pages.update(Report.load(RESULTS)), sep="\n  ")


def _measure(chosen: list[tuple[Case, list[Method]]], quick: bool, path: Path | None) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # those of other libraries, which would break up the tables
    settings = QUICK if quick else Settings()
    config, machine = environment(settings, quick)
    print(f"{machine['cpu']}, one thread; " + ", ".join(f"{n} {v}" for n, v in machine["packages"].items()))
    if machine["load"] is not None and machine["load"] > 0.5:
        print(f"The machine is busy (load {machine['load']} on {os.cpu_count()} cores): expect wide ranges.")
    print("Ratios to the plain forward in the same round; see docs/benchmarks.md.\n", flush=True)
    found = Report({}, [], [], config, machine)
    with torch.no_grad():
        for case, methods in chosen:
            done = run(case, methods, settings, quick)
            found.titles[case.name] = case.title
            found.rows.extend(done)
            found.comparisons.extend(compared(case.name, case.faster, done))
            print(report.table(f"{case.name}: {case.title}", done), flush=True)
            if path is not None:
                _merged(path, found).save(path)
    print(report.summary(found))


def _merged(path: Path, found: Report) -> Report:
    """A new report beside what the file says of other cases, memory and workers."""
    if not path.exists():
        return found
    kept = Report.load(path)
    titles = kept.titles | found.titles
    order = [case.name for suite in SUITES.values() for case in suite(None)]
    names = sorted(titles, key=lambda name: order.index(name) if name in order else len(order))
    rows = [r for name in names for r in (found if name in found.titles else kept).of(name)]
    others = [c for c in kept.comparisons if c.case not in found.titles]
    comparisons = sorted([*others, *found.comparisons], key=lambda c: names.index(c.case))
    merged = {"titles": {name: titles[name] for name in names}, "rows": rows, "comparisons": comparisons}
    return replace(found, **merged, memory=kept.memory, workers=kept.workers)


def chosen(pattern: str | None, batches: list[int] | None = None) -> list[tuple[Case, list[Method]]]:
    """The cases and their methods that a pattern selects."""
    found = [(case, case.chosen(pattern)) for suite in SUITES.values() for case in suite(batches)]
    return [(case, methods) for case, methods in found if methods]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Speed and memory against other libraries.")
    parser.add_argument("--quick", action="store_true", help="about a minute: few rounds, the slowest methods left out")
    parser.add_argument(
        "--only", metavar="PATTERN", help="rows whose name (see --list) contains this or matches as a glob"
    )
    parser.add_argument("--batches", metavar="N", type=_positive, nargs="+", help="batch sizes (default: 1 64 1024)")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the results there too; cases that did not run stay as they are"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all rows and stop")
    parser.add_argument("--docs", action="store_true", help="rewrite the tables of docs and README from results.json")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("a batch has at least one sample")
    return value


if __name__ == "__main__":
    sys.exit(main())
