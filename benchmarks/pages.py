"""Puts the tables of a stored report between the markers of the documentation, and draws its figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks import capacity, plots, report
from benchmarks.results import ROOT, Report, write

PAGE = ROOT / "docs" / "benchmarks.md"
CAPACITY = ROOT / "docs" / "capacity.md"
README = ROOT / "README.md"
EXACT = ROOT / "docs" / "how-to" / "exact.md"


def update(stored: Report) -> list[Path]:
    """The files that were rewritten."""
    figures = plots.draw(stored)
    marked(PAGE, "benchmarks", report.markdown(stored))
    marked(README, "benchmarks", report.headline(stored))
    marked(EXACT, "engines", report.engines(stored))
    for name, text in capacity.sections(stored).items():
        marked(CAPACITY, name, text)
    return [PAGE, README, EXACT, CAPACITY, *(plots.IMAGES / name for name in figures)]


def marked(page: Path, name: str, text: str) -> None:
    """Put text between the two markers of a name: `<!-- name:start -->` and `<!-- name:end -->`."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    old = page.read_text()
    if old.count(start) != 1 or old.count(end) != 1:
        raise SystemExit(f"{page} needs the markers {start} and {end}, once each")
    before, rest = old.split(start)
    after = rest.split(end)[1]
    write(page, f"{before}{start}\n\n{text}\n\n{end}{after}")
