"""Put headline tables of the stored results into a page, and the numbers within its sentences (numbers.py).

python -m experiments.report.readme README.md                                        # those of the paper, and selective
python -m experiments.report.readme docs/how-to/calibration.md results calibration   # one
python -m experiments.report.readme docs/how-to/tune.md results uses
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.frame.names import NAMES, experiment
from experiments.report.numbers import filled
from experiments.report.page import section
from propagauss.demo.report.files import write

START, END = "<!-- experiments:start -->", "<!-- experiments:end -->"


BEYOND = ("calibration", "uses", "valla", "selective")  # not in the paper: they have pages of their own
PAPER = tuple(name for name in NAMES if name not in BEYOND)
README = (*PAPER, "selective")


def headlines(results: Path, names: Sequence[str] = PAPER) -> str:
    """Markdown of all of these experiments that have a headline."""
    parts = []
    for name in names:
        found = section(name, results, "full")
        if found is not None and found.headline:
            parts += [f"**{experiment(name).title}**", found.headline] if len(names) > 1 else [found.headline]
    return "\n\n".join(parts)


def update(page: Path, results: Path, names: Sequence[str] = PAPER) -> None:
    """Replace what stands between the markers of the page, and its numbers."""
    text = filled(page.read_text(encoding="utf-8"), results)
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page} needs the markers {START} and {END}, once each")
    before, rest = text.split(START)
    write(page, f"{before}{START}\n\n{headlines(results, names)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    update(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "results"), sys.argv[3:] or README)
