"""Put headline tables of the stored results into a page: `python -m experiments.report.readme README.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.frame.names import NAMES, experiment
from experiments.report.page import section
from propagauss.demo.report.files import write

START, END = "<!-- experiments:start -->", "<!-- experiments:end -->"


def headlines(results: Path) -> str:
    """Markdown of all experiments that have a headline."""
    parts = []
    for name in NAMES:
        found = section(name, results, "full")
        if found is not None and found.headline:
            parts += [f"**{experiment(name).title}**", found.headline]
    return "\n\n".join(parts)


def update(page: Path, results: Path) -> None:
    """Replace what stands between the markers of the page."""
    text = page.read_text(encoding="utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page} needs the markers {START} and {END}, once each")
    before, rest = text.split(START)
    write(page, f"{before}{START}\n\n{headlines(results)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    update(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "results"))
