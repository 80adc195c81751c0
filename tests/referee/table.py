"""The verdicts as one table, and as a list of failures, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from referee.case import Case
from referee.cases import BATTERY
from referee.judge import GOOD, Verdict, judge
from referee.truth import STRUCTURES, Mode

MODES: tuple[Mode, ...] = ("full", "diagonal")
START, END = "<!-- referee:start -->", "<!-- referee:end -->"
SHARED = {c.name for c in BATTERY if c.shared}
_WORST = ("wrong mean", "wrong", "not finite", "crash", "refused", "approximated", "exact")


def verdicts(
    cases: Iterable[Case], modes: Iterable[Mode] = MODES, every: bool = False, tell: Callable[[str], None] = print
) -> list[Verdict]:
    """Judge cases: with the posterior of their turn, or with `every` structure."""
    found = []
    for case in cases:
        for mode in modes:
            structures = STRUCTURES if every else (case.turn if mode == "full" else "diagonal",)
            for structure in structures:
                verdict = judge(case, mode, structure)
                found.append(verdict)
                if not verdict.is_good:
                    tell(str(verdict))
    return found


def failures(found: Iterable[Verdict]) -> str:
    """Silent wrong numbers first, by how wrong they are; then crashes; then refusals, which are allowed."""
    ranked = sorted(found, key=lambda v: (_WORST.index(v.kind), -v.error))
    bad = [v for v in ranked if not v.is_good]
    refused = [v for v in ranked if v.kind == "refused"]
    counts = {kind: sum(v.kind == kind for v in ranked) for kind in _WORST}
    lines = [", ".join(f"{kind}: {count}" for kind, count in counts.items()), "", "## Failures", ""]
    lines += (
        [f"- {v}{' (a parameter is used at several places)' if v.case in SHARED else ''}" for v in bad]
        + ["", "## Refused", ""]
        + [f"- {v}" for v in refused]
    )
    return "\n".join(lines) + "\n"


def table(cases: Iterable[Case], found: Iterable[Verdict]) -> str:
    """Markdown: a row per case, under the heading of its section."""
    found = list(found)
    lines: list[str] = []
    section = None
    for case in cases:
        if case.section != section:
            section = case.section
            lines += ["", f"### {section}", "", "| op or idiom | full | diagonal |", "| --- | --- | --- |"]
        cells = [_cell([v for v in found if v.case == case.name and v.mode == mode]) for mode in MODES]
        lines.append(f"| {_escaped(case.name)} | {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def _cell(found: list[Verdict]) -> str:
    """The worst of the verdicts that one case got in one mode."""
    if not found:
        return "–"
    worst = min(found, key=lambda v: _WORST.index(v.kind))
    if worst.kind == "exact":
        return "exact"
    text = f"{worst.kind}: {worst.how}" if worst.kind == "approximated" else worst.kind
    return _escaped(text if worst.kind in GOOD else f"**{text}**")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*") if not text.startswith("**") else text


@cache
def kinds_on(page: Path) -> dict[str, tuple[str, ...]]:
    """What the page says of each case: `exact`, `approximated` or `refused`, by mode in the order of `MODES`."""
    rows = page.read_text().split(START)[1].split(END)[0].splitlines()
    cells = [[c.strip() for c in row.strip("|").split(" | ")] for row in rows if row.startswith("| ")]
    return {c[0].replace("\\", "").strip(): tuple(t.partition(":")[0] for t in c[1:]) for c in cells}


def write(page: Path, text: str) -> None:
    """Between the markers of the page."""
    before, rest = page.read_text().split(START)
    page.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}")
