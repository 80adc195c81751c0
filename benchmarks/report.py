"""What a run leaves behind: a table on the terminal, a JSON file, and the tables of docs/benchmarks.md made from it."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import propagauss
from benchmarks.case import PLAIN
from benchmarks.harness import Settings, Timing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
PACKAGES = ("torch", "laplace-torch", "suq", "curvlinops-for-pytorch", "numpy")
HEADER = ("method", "ratio", "10 to 90 %", "rounds × repeats", "memory", "limit", "met")


@dataclass(frozen=True)
class Row:
    case: str
    method: str
    timing: Timing | None = None
    computed: float | None = None
    limit: float | None = None
    peak_bytes: int | None = None
    extra_bytes: int | None = None  # beyond the peak of the plain forward
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the row keeps its limit; None without a limit or a timing."""
        return None if self.limit is None or self.timing is None else self.timing.ratio <= self.limit

    def cells(self) -> tuple[str, ...]:
        t = self.timing
        return (
            self.method,
            "" if t is None and self.computed is None else _times(t.ratio if t else self.computed or 0.0),
            "" if t is None else f"{_number(t.low)} to {_number(t.high)}",
            "computed" if self.computed is not None else "" if t is None else f"{t.rounds} × {t.repeats}",
            self._memory(),
            "" if self.limit is None else _times(self.limit),
            {True: "yes", False: "NO", None: ""}[self.met],
        )

    def _memory(self) -> str:
        if self.extra_bytes is not None:
            return f"{'+' if self.extra_bytes >= 0 else '-'}{_bytes(abs(self.extra_bytes))}"
        return "" if self.peak_bytes is None else _bytes(self.peak_bytes)


@dataclass(frozen=True)
class Report:
    titles: dict[str, str]  # by case
    rows: list[Row]
    settings: dict[str, Any]
    environment: dict[str, Any]

    def save(self, path: Path) -> None:
        rows = [asdict(r) | {"met": r.met} for r in self.rows]
        write(path, json.dumps(asdict(self) | {"rows": rows}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Report:
        stored = json.loads(path.read_text())
        rows = []
        for entry in stored["rows"]:
            entry.pop("met")
            rows.append(Row(**entry | {"timing": entry["timing"] and Timing(**entry["timing"])}))
        return Report(stored["titles"], rows, stored["settings"], stored["environment"])


def environment(settings: Settings, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the numbers depend on: settings of the run, and the machine."""
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {"propagauss": propagauss.__version__} | {p: v for p in PACKAGES if (v := _version(p))},
    }
    return asdict(settings) | {"threads": 1, "quick": quick}, machine


# -- the terminal


def table(title: str, rows: list[Row]) -> str:
    cells = [HEADER, *(r.cells() for r in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADER))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    rule = "-" * len(lines[0])
    notes = [f"  {r.method}: {r.note}" for r in rows if r.note]
    return "\n".join([f"{title} ({_plain_time(rows)})", lines[0], rule, *lines[1:], *notes, ""])


def summary(rows: Iterable[Row]) -> str:
    """One line: how many of the limits hold."""
    limited = [r for r in rows if r.limit is not None]
    if not limited:
        return "No row of this run has a limit."
    failed = [f"{r.case}/{r.method}" for r in limited if r.met is False]
    missing = [f"{r.case}/{r.method}" for r in limited if r.met is None]
    text = f"Limits met: {len(limited) - len(failed) - len(missing)} of {len(limited)}."
    if failed:
        text += f" Not met: {', '.join(failed)}."
    return text + (f" Not measured: {', '.join(missing)}." if missing else "")


# -- the documentation


def markdown(report: Report) -> str:
    env, settings = report.environment, report.settings
    packages = ", ".join(f"{name} {number}" for name, number in env["packages"].items())
    parts = [
        f"Measured {env['date']} on one thread of {env['cpu']} ({env['cores']} cores, load {env['load']} at the "
        f"start), {env['system']}, Python {env['python']}, {packages}; up to {settings['rounds']} rounds, blocks of "
        f"{1000 * settings['block']:g} ms{', quick run' if settings['quick'] else ''}.",
        summary(report.rows),
    ]
    for case, group in groupby(report.rows, key=lambda r: r.case):
        rows = list(group)
        lines = [f"| {' | '.join(HEADER)} |", f"|---{'|--:' * (len(HEADER) - 1)}|"]
        lines += [f"| {' | '.join(r.cells())} |" for r in rows]
        parts += [f"### {report.titles[case]}", f"The {_plain_time(rows)}.", "\n".join(lines)]
        parts += ["\n".join(f"- {r.method}: {r.note}" for r in rows if r.note)]
    return "\n\n".join(filter(None, parts))


def headline(report: Report) -> str:
    """The short table of the README: one row per method, one column per case of the MLP."""
    rows = {(r.case, r.method): r for r in report.rows}
    wanted = [case for case in report.titles if case.startswith(("mlp/diagonal/", "mlp/kronecker"))]
    methods = list(dict.fromkeys(r.method for r in report.rows if r.case in wanted and (r.timing or r.computed)))
    header = ["", *(case.removeprefix("mlp/").replace("/", ", batch ") for case in wanted)]
    lines = [f"| {' | '.join(header)} |", f"|---{'|--:' * len(wanted)}|"]
    for method in methods:
        cells = [rows[case, method].cells()[1] if (case, method) in rows else "" for case in wanted]
        lines.append(f"| {' | '.join([method, *cells])} |")
    return "\n\n".join(filter(None, ("\n".join(lines), _transformers(report))))


def _transformers(report: Report) -> str:
    """One row per part of a large model that is Bayesian."""
    models = {"transformers/vit": "ViT-base", "transformers/gpt": "GPT-2"}
    rows = [r for r in report.rows if r.case in models and r.method != PLAIN and r.timing]
    if not rows:
        return ""
    lines = ["| large models, batch 1: what is Bayesian | time | memory |", "|---|--:|--:|"]
    for row in rows:
        cells = row.cells()
        lines.append(f"| {models[row.case]}: {row.method} | {cells[1]} | {cells[4]} |")
    return "\n".join(lines)


def update_page(report: Report, page: Path = PAGE) -> None:
    """Put the tables of `report` between the markers of the page."""
    between(page, markdown(report))


def update_readme(report: Report) -> None:
    between(README, headline(report))


def between(page: Path, tables: str, start: str = START, end: str = END) -> None:
    """Put text between two markers of a page."""
    text = page.read_text()
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"{page} needs the markers {start} and {end}, once each")
    before, rest = text.split(start)
    after = rest.split(end)[1]
    write(page, f"{before}{start}\n\n{tables}\n\n{end}{after}")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain_time(rows: list[Row]) -> str:
    plain: Mapping[str, Timing | None] = {r.method: r.timing for r in rows}
    timing = plain.get(PLAIN)
    return f"{PLAIN} takes {1e6 * timing.seconds:,.0f} µs" if timing else f"{PLAIN} not timed"


def _times(ratio: float) -> str:
    return f"{_number(ratio)}x"


def _number(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 99.5 else f"{ratio:.1f}" if ratio >= 9.95 else f"{ratio:.2f}"


def _bytes(count: int) -> str:
    return f"{count / 2**10:,.1f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
