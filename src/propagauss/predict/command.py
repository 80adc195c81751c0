"""`propagauss predict`: its options, and the call."""

from __future__ import annotations

import argparse
from pathlib import Path

from propagauss.predict.job import predict
from propagauss.predict.options import ENGINES, ON_NAN


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help=".onnx or .pt2, as Classifier.export writes them")
    parser.add_argument("data", type=Path, metavar="DATA", help=".parquet, .csv or .npy, or a folder of one kind")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".parquet or .csv")
    parser.add_argument(
        "--columns",
        type=_names,
        metavar="A,B,C",
        help="what makes the input (all columns of numbers, or one of lists); X=A,B,Y=C for inputs X and Y",
    )
    parser.add_argument("--id", metavar="COLUMN", help="copied to the output (otherwise rows are counted)")
    parser.add_argument("--batch", type=_count, metavar="N", help="rows at a time (some megabytes)")
    parser.add_argument(
        "--on-nan",
        choices=ON_NAN,
        default="error",
        help="rows with NaN or infinite values (error)",
    )
    parser.add_argument("--engine", choices=ENGINES, default="local", help="where the work is done (local)")
    parser.add_argument("--workers", type=_count, metavar="N", help="processes of the engine ray (one for each core)")
    parser.add_argument("--threads", type=_count, metavar="N", help="of each process (ray: 1)")
    parser.add_argument("--address", help="of a Ray cluster (RAY_ADDRESS, or none: one is started here)")
    parser.add_argument("--part-rows", type=_count, metavar="N", help="rows in a part, the unit that a restart keeps")
    parser.add_argument("--restart", action="store_true", help="discard finished parts of an interrupted run")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")


def run(args: argparse.Namespace) -> int:
    options = {name: value for name, value in vars(args).items() if name != "command"}
    summary = predict(**options)
    if summary.columns:
        print(f"input: {', '.join(summary.columns)}")
    print(summary)
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value
