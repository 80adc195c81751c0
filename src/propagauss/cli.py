"""`propagauss demo`: the command line. Each subcommand is one entry of `COMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from propagauss.errors import PropagaussError
from propagauss.version import __version__

OPTIONAL = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "pyarrow": "pyarrow"}


@dataclass(frozen=True)
class Command:
    """A subcommand: what it says about itself, its options, what it does, and the optional packages it needs."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    needs: tuple[str, ...] = ()
    extra: str = "experiments"  # that brings them


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("propagauss-demo"), metavar="DIR", help="where results go")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of splits, training and sampling")
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute: small networks, few samples")


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:  # what scikit-learn, NumPy and torch all accept
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 2147483647")
    return value


def _demo(args: argparse.Namespace) -> int:
    from propagauss.experiments.demo import run

    report = run(args.out, seed=args.seed, quick=args.quick)
    print(f"report: {report}")
    return 0


def _reproduce_options(parser: argparse.ArgumentParser) -> None:
    from propagauss.experiments.paper.names import NAMES

    known = [*NAMES, "all", []]  # the empty list: no name at all
    parser.add_argument("names", nargs="*", choices=known, metavar="NAME", help=f"all, {', '.join(NAMES)}")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets (or set PROPAGAUSS_DATA)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", dest="mode", action="store_const", const="quick", help="subsets: minutes, no meaning")
    mode.add_argument("--full", dest="mode", action="store_const", const="full", help="the whole protocol (default)")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR", help="where results are kept")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of splits, training and sampling")
    parser.add_argument("--again", action="store_true", help="also run what is stored already")
    parser.set_defaults(mode="full")


def _reproduce(args: argparse.Namespace) -> int:
    from propagauss.experiments.paper.names import NAMES
    from propagauss.experiments.paper.run import reproduce

    names = list(NAMES) if "all" in args.names else list(dict.fromkeys(args.names))
    missing = reproduce(names, args.mode, args.data, args.results, args.seed, args.again)
    for message in missing:
        _fail(message, 1)
    return 1 if missing else 0


def _predict_options(parser: argparse.ArgumentParser) -> None:
    from propagauss.predict.command import configure

    configure(parser)


def _predict(args: argparse.Namespace) -> int:
    from propagauss.predict.command import run

    return run(args)


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "train on bundled data, fit posteriors, compare predictions, write an HTML report",
        _demo_options,
        _demo,
        ("sklearn", "matplotlib"),
    ),
    "reproduce": Command(
        "run experiments of the paper, going on where a run was stopped, and write the report (no name: only that)",
        _reproduce_options,
        _reproduce,
        ("sklearn", "matplotlib"),
    ),
    "predict": Command(
        "stream a large data set through an exported model, going on where a run was stopped",
        _predict_options,
        _predict,
        ("pyarrow",),
        "predict",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (2: wrong usage, or something needed is not installed)."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has said why; callers of main() get a number, not an exception
        return stop.code if isinstance(stop.code, int) else 2
    if args.command is None:
        parser.print_help()
        return 2
    command = COMMANDS[args.command]
    absent = [OPTIONAL[name] for name in command.needs if not _importable(name)]
    if absent:
        return _fail(f"`{args.command}` needs {' and '.join(absent)}: pip install propagauss[{command.extra}]", 2)
    try:
        return command.run(args)
    except PropagaussError as error:
        return _fail(str(error), 1)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _fail(f"{error.strerror or error}{where}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="propagauss", description="Predictive distributions of Bayesian neural networks in one forward pass."
    )
    parser.add_argument("--version", action="version", version=f"propagauss {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, command in COMMANDS.items():
        command.configure(commands.add_parser(name, help=command.help, description=command.help))
    return parser


def _importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # installed but broken: its own error says more than we could
            raise
        return False
    return True


def _fail(message: str, code: int) -> int:
    print(f"propagauss: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
