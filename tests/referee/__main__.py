"""Judge cases of the battery.

python -m referee                                  # all, each with the posterior of its turn: the table
python -m referee --failures                       # what is wrong, worst first, and what is refused
python -m referee "h + -0.9 Linear(h)" --plan      # one case (a part of the name or heading will do), with its plan
python -m referee --every --examples 300 --write docs/referee.md      # the long run: all posteriors, random models
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

import propagauss as pg
from referee.case import Case
from referee.cases import BATTERY
from referee.table import MODES, failures, table, verdicts, write
from referee.truth import random_posterior


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts of names or headings; all cases if there are none")
    parser.add_argument("--mode", choices=MODES, help="only this one")
    parser.add_argument("--every", action="store_true", help="all posterior structures rather than one in turn")
    parser.add_argument("--examples", type=int, default=0, help="how many random models to try, too")
    parser.add_argument("--failures", action="store_true", help="print failures and refusals rather than the table")
    parser.add_argument("--plan", action="store_true", help="print the plans of the cases")
    parser.add_argument("--write", type=Path, help="a page that holds the markers of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [c for c in BATTERY if _matches(c, args.parts)]
    if args.plan:
        for case in chosen:
            _print_plans(case)
    found = verdicts(
        chosen, (args.mode,) if args.mode else MODES, args.every, lambda line: print(line, file=sys.stderr)
    )
    if args.write:
        write(args.write, table(chosen, found))
    if args.failures:
        print(failures(found))
    elif not args.write:
        print(table(chosen, found))
    wrong = sum(not v.is_good for v in found)
    if args.examples:
        from referee.programs import try_many

        wrong += try_many(args.examples)
    return min(wrong, 1)


def _matches(case: Case, parts: list[str]) -> bool:
    """By its whole name where a part is one, else by part of the name or heading."""
    names = {c.name for c in BATTERY}
    return not parts or any(p == case.name if p in names else p in case.name or p in case.section for p in parts)


def _print_plans(case: Case) -> None:
    model, inputs, names = case.build()
    shapes = {n: p.shape for n, p in model.named_parameters() if n in names}
    posterior, _ = random_posterior(shapes, "diagonal", case.generator())
    for mode in MODES:
        try:
            print(f"{case.name}, {mode}:\n{pg.streamline(model, posterior, inputs, covariance=mode).plan}\n")
        except pg.PropagaussError as error:
            print(f"{case.name}, {mode}: refused: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
