"""Whether a change made predictions slower: two versions of the library, timed in turns on the same cases.

    python -m benchmarks.before_after main~5                # that commit against the working tree
    python -m benchmarks.before_after v1.0 --only 'resnet*'

Each version gets a process of its own, which builds a case and then times single blocks when it is asked to. The two
build side by side and are timed in turns within every round, in changing order, so that a machine that changes speed
changes both. A row is printed as soon as it is known. The cases are those of this checkout; a version that cannot run
one says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tqdm import tqdm

from benchmarks.report import markdown_row, markdown_table

HEADER = ("case", "before, x plain", "after, x plain", "after / before", "10% to 90%")
ROOT = Path(__file__).parents[1]
Workers = dict[str, subprocess.Popen[str]]
ROUNDS, BLOCK = 15, 0.03
FEWEST, LONGEST = 3, 60.0  # rounds of a case that takes more seconds than this


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    if args.serve:
        serve()
        return
    with ExitStack() as stack:
        checkouts = {"before": stack.enter_context(checkout(args.before)), "after": ROOT}
        workers = {version: stack.enter_context(worker(path)) for version, path in checkouts.items()}
        print(markdown_table(HEADER, []), flush=True)
        for name in tqdm(_names(args.only), disable=None):
            tqdm.write(markdown_row(compare(name, workers, args.rounds)))
            sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after", description=__doc__.split("\n")[0])
    parser.add_argument("before", nargs="?", default="HEAD", help="a commit of this repository")
    parser.add_argument("--only", metavar="PATTERN", help="rows as `python -m benchmarks --only` takes them")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="blocks of each version and case")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def _names(only: str | None) -> list[str]:
    """Of the methods that are ours and are timed: other libraries do not change with a commit.

    What is slow to build only where a pattern asks for it.
    """
    from benchmarks.__main__ import chosen

    return [
        f"{case.name}/{m.name}"
        for case, methods in chosen(only)
        for m in methods
        if m.make is not None
        and (only or not m.heavy)
        and not any(w in m.name for w in ("suq", "laplace", "hand", "samples"))
    ]


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with that commit's files."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def compare(name: str, workers: Workers, rounds: int) -> tuple[str, ...]:
    """One row of the table."""
    built = ask_all(workers, {"build": name})
    errors = {version: answer["error"] for version, answer in built.items() if "error" in answer}
    if errors:
        return name, *["fails" if v in errors else "" for v in workers], "", "; ".join(errors.values())[:80]
    blocks: dict[str, list[tuple[float, float]]] = {version: [] for version in workers}
    start = time.monotonic()
    for done in range(rounds):
        if done >= FEWEST and time.monotonic() - start > LONGEST:
            break
        for version in random.sample(list(workers), len(workers)):
            answer = ask(workers[version], {"block": BLOCK})
            blocks[version].append((answer["plain"], answer["method"]))
    ratios = [after[1] / before[1] for before, after in zip(blocks["before"], blocks["after"], strict=True)]
    tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    multiples = [f"{median(m / p for p, m in blocks[v]):.2f}" for v in workers]
    return name, *multiples, f"{median(ratios):.2f}", f"{tenths[0]:.2f} to {tenths[-1]:.2f}"


@contextmanager
def worker(path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(path / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.before_after", "--serve"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any]:
    return ask_all({"": process}, question)[""]


def ask_all(workers: Workers, question: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All of them at once: each answers beside the others."""
    for process in workers.values():
        assert process.stdin is not None
        print(json.dumps(question), file=process.stdin, flush=True)
    return {version: answer_of(process) for version, process in workers.items()}


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    return {"error": "the process ended"}


def serve() -> None:
    """The other side of `ask`: one question and one answer per line."""
    import torch

    from benchmarks.__main__ import chosen
    from benchmarks.harness import Subject

    torch.set_num_threads(1)
    subjects: dict[str, Subject] = {}
    calls: dict[str, int] = {}
    for line in sys.stdin:
        question, answer = json.loads(line), {}
        try:
            if "build" in question:
                case, method = next(
                    (c, m) for c, methods in chosen(None) for m in methods if f"{c.name}/{m.name}" == question["build"]
                )
                subjects.clear()  # memory for the next
                x = case.inputs()
                subjects = {"plain": Subject(case.plain(), x), "method": Subject(method.make(), x, method.needs_grad)}
                for name, subject in subjects.items():
                    subject.seconds(3)
                    calls[name] = max(1, round(BLOCK / subject.seconds(1)))
            else:
                for name, subject in subjects.items():
                    subject.once()
                    answer[name] = subject.seconds(calls[name]) / calls[name]
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
