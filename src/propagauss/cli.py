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

MOVED = {
    "reproduce": "the paper's experiments are not part of the package any more: in a clone of the repository, "
    "run `python -m experiments NAME` (or `make reproduce NAME=uci`)"
}
OPTIONAL = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "pyarrow": "pyarrow"}


@dataclass(frozen=True)
class Command:
    """A subcommand: what it says about itself, its options, what it does, and the optional packages it needs."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    needs: tuple[str, ...] = ()
    extra: str = "demo"  # that brings them


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("propagauss-demo"), metavar="DIR", help="where results go")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of splits, training and sampling")
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute: small networks, few samples")


def seed(text: str) -> int:
    """A seed from the command line."""
    value = int(text)
    if not 0 <= value < 2**31:  # what scikit-learn, NumPy and torch all accept
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 2147483647")
    return value


def _demo(args: argparse.Namespace) -> int:
    from propagauss.demo.run import run

    report = run(args.out, seed=args.seed, quick=args.quick)
    print(f"report: {report}")
    return 0


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
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in MOVED:
        return fail(MOVED[given[0]], 2)
    parser = _parser()
    try:
        args = parser.parse_args(given)
    except SystemExit as stop:  # argparse has said why; callers of main() get a number, not an exception
        return stop.code if isinstance(stop.code, int) else 2
    if args.command is None:
        parser.print_help()
        return 2
    command = COMMANDS[args.command]
    absent = absent_packages(command.needs)
    if absent:
        return fail(f"`{args.command}` needs {' and '.join(absent)}: pip install propagauss[{command.extra}]", 2)
    return guarded(command.run, args)


def guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace, program: str = "propagauss") -> int:
    """What `run` returns; errors that a user can do something about become one line and an exit code."""
    try:
        return run(args)
    except PropagaussError as error:
        return fail(str(error), 1, program)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return fail(f"{error.strerror or error}{where}", 1, program)
    except KeyboardInterrupt:
        return fail("interrupted", 130, program)


def absent_packages(modules: Sequence[str]) -> list[str]:
    """Those of the optional packages that are not installed, by the names they install under."""
    return [OPTIONAL[name] for name in modules if not _importable(name)]


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


def fail(message: str, code: int, program: str = "propagauss") -> int:
    """Say why on standard error; returns the exit code."""
    print(f"{program}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
