"""Command line of the benchmarks; the exit code is 0 whatever the numbers, since speed is not a test."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

import torch

from benchmarks import growth, mlp, report, transformers
from benchmarks.case import Case, Method
from benchmarks.harness import QUICK, Settings
from benchmarks.report import Report
from benchmarks.run import run

SUITES = {"mlp": mlp.cases, "growth": growth.cases, "transformers": transformers.cases}
BY_DEFAULT = ("mlp", "transformers")  # the others run when --only asks for them


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    if args.docs:
        if not report.RESULTS.exists():
            raise SystemExit(f"no {report.RESULTS}: run `python -m benchmarks --json {report.RESULTS}` first")
        stored = Report.load(report.RESULTS)
        report.update_page(stored)
        report.update_readme(stored)
        print(f"rewrote {report.PAGE} and {report.README}")
        return
    chosen = _chosen(args.only, args.batches)
    if args.list:
        print(*[f"{case.name}/{m.name}" for case, methods in chosen for m in methods], sep="\n")
        return
    if not chosen:
        raise SystemExit(f"nothing matches {args.only!r}; see --list")
    if args.json is not None and not args.json.parent.is_dir():
        raise SystemExit(f"no such directory: {args.json.parent}")
    _measure(chosen, args.quick, args.json)


def _measure(chosen: list[tuple[Case, list[Method]]], quick: bool, path: Path | None) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # those of other libraries, which would break up the tables
    settings = QUICK if quick else Settings()
    config, machine = report.environment(settings, quick)
    print(f"{machine['cpu']}, one thread; " + ", ".join(f"{n} {v}" for n, v in machine["packages"].items()))
    if machine["load"] is not None and machine["load"] > 0.5:
        print(f"The machine is busy (load {machine['load']} on {os.cpu_count()} cores): expect wide spreads.")
    print("Ratios to the plain forward in the same round; see docs/benchmarks.md.\n", flush=True)
    rows = []
    with torch.no_grad():
        for case, methods in chosen:
            done = run(case, methods, settings, quick)
            rows += done
            print(report.table(f"{case.name}: {case.title}", done), flush=True)
    print(report.summary(rows))
    if path is not None:
        Report({case.name: case.title for case, _ in chosen}, rows, config, machine).save(path)


def _chosen(pattern: str | None, batches: list[int] | None) -> list[tuple[Case, list[Method]]]:
    suites = SUITES if pattern is not None else {name: SUITES[name] for name in BY_DEFAULT}
    found = [(case, case.chosen(pattern)) for suite in suites.values() for case in suite(batches)]
    return [(case, methods) for case, methods in found if methods]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Speed and memory against other libraries.")
    parser.add_argument("--quick", action="store_true", help="about a minute: few rounds, the slowest methods left out")
    parser.add_argument(
        "--only", metavar="PATTERN", help="rows whose name (see --list) contains this or matches as a glob"
    )
    parser.add_argument("--batches", metavar="N", type=_positive, nargs="+", help="batch sizes (default: 1 64 1024)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there too")
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
