"""Command line of the survey.

python -m families run                       # what has no record yet
python -m families run --failures            # again what did not work
python -m families run --only 'graph/*'      # again what matches
python -m families summary                   # counts, and a table of reasons
"""

from __future__ import annotations

import argparse
import os
import random
import warnings
from fnmatch import fnmatch
from pathlib import Path

import torch

from families import report, sources
from families.family import Family
from families.runner import Limits, Record, read, run

RESULTS = Path(__file__).parents[2] / "results" / "cache" / "families.jsonl"


def main() -> None:
    args = _arguments()
    if args.command in ("summary", "counts"):
        records = read(args.results)
        print(report.summary(records, args.examples) if args.command == "summary" else report.counts(records.values()))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for source in sources.SOURCES:  # one after another: timm is not loaded before the others are done
        if args.command == "list":
            print(*[f.name for f in source() if _matches(f, args.only)], sep="\n")
        else:
            run(_chosen(source(), args), args.results, Limits(args.seconds, args.gigabytes, args.quick))
    if args.command == "run":
        print(report.summary(read(args.results), args.examples))


def _chosen(families: list[Family], args: argparse.Namespace) -> list[Family]:
    records = read(args.results)
    matching = [f for f in families if _matches(f, args.only)]
    random.Random(0).shuffle(matching)  # a run that is cut short is then a fair sample
    if args.failures:
        return [f for f in matching if f.name in records and not _works(records[f.name])]
    if args.only and not args.resume:
        return matching
    return [f for f in matching if f.name not in records]


def _matches(family: Family, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch(family.name, p) for p in patterns)


def _works(record: Record) -> bool:
    return all(record.get(which, {}).get("status") == "ok" for which in ("last", "all"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="families", description="Which model families propagauss takes.")
    parser.add_argument("command", choices=["run", "list", "summary", "counts"])
    parser.add_argument("--only", nargs="*", default=[], help="patterns such as 'timm/*'; these are run again")
    parser.add_argument("--resume", action="store_true", help="with --only: skip what has a record")
    parser.add_argument("--failures", action="store_true", help="run again what has a record that is not all well")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the records, as JSON lines")
    parser.add_argument("--quick", action="store_true", help="only everything random; the last block where that fails")
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time, limit for one family")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="limit for one family")
    parser.add_argument("--examples", type=int, default=6, help="families named per reason in the summary")
    return parser.parse_args()


if __name__ == "__main__":
    main()
