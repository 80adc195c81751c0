"""`python -m experiments NAME ...`, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.frame.names import NAMES
from propagauss.cli import absent_packages, fail, guarded, seed

PROGRAM = "python -m experiments"
EPILOG = """\
No NAME: list what is stored and what is missing. `report`: only write the report, from what is stored.
A run that was stopped goes on where it was. docs/experiments.md describes the experiments and the data folder.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiments named; returns the exit code (1: something could not be run, 2: wrong usage)."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why; callers of main() get a number, not an exception
        return stop.code if isinstance(stop.code, int) else 2
    absent = absent_packages(("sklearn", "matplotlib"))
    if absent:
        return fail(f"the experiments need {' and '.join(absent)}: pip install .[demo]", 2, PROGRAM)
    return guarded(_run, args, PROGRAM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Run experiments of the paper again, unit by unit, and write the report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [*NAMES, "all", "report", []]  # the empty list: no name at all
    parser.add_argument("names", nargs="*", choices=known, metavar="NAME", help=f"all, report, {', '.join(NAMES)}")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets (or set PROPAGAUSS_DATA)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", dest="mode", action="store_const", const="quick", help="subsets: minutes, no meaning")
    mode.add_argument("--full", dest="mode", action="store_const", const="full", help="the whole protocol (default)")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="where results are kept")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of splits, training and sampling")
    parser.add_argument("--again", action="store_true", help="also run what is stored already")
    parser.set_defaults(mode="full")
    return parser


def _run(args: argparse.Namespace) -> int:
    if not args.names:
        return _list(args)
    from experiments.frame.run import reproduce

    wanted = NAMES if "all" in args.names else dict.fromkeys(name for name in args.names if name != "report")
    missing = reproduce(list(wanted), args.mode, args.data, args.results, args.seed, args.again)
    for message in missing:
        fail(message, 1, PROGRAM)
    return 1 if missing else 0


def _list(args: argparse.Namespace) -> int:
    from experiments.frame.experiment import Context
    from experiments.frame.status import status

    context = Context(args.mode, args.seed, args.data, args.results / "cache")
    print(f"{args.results}, {args.mode} runs:\n{status(context, args.results)}")
    if context.data_folder is None:
        print("What is missing depends on the data: name their folder with --data DIR or PROPAGAUSS_DATA.")
    print(f"To run one: {PROGRAM} NAME --data DIR")
    return 0


if __name__ == "__main__":
    sys.exit(main())
