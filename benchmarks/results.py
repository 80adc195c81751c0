"""What a run leaves behind: one JSON file, from which the tables of the documentation are made."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import propagauss
from benchmarks.case import Faster
from benchmarks.harness import Settings, Timing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PACKAGES = ("torch", "onnxruntime", "transformers", "laplace-torch", "suq", "curvlinops-for-pytorch", "numpy")


@dataclass(frozen=True)
class Row:
    case: str
    method: str
    timing: Timing | None = None
    computed: float | None = None
    limit: float | None = None
    error: float | None = None  # of standard deviations, as a fraction
    error_limit: float | None = None
    peak_bytes: int | None = None
    extra_bytes: int | None = None  # beyond the peak of the plain forward
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """To the plain forward, measured or computed."""
        return self.timing.ratio if self.timing else self.computed

    @property
    def met(self) -> bool | None:
        """Whether the row keeps its limits; None without a limit or a timing."""
        if self.timing is None or (self.limit is None and self.error_limit is None):
            return None
        slow = self.limit is not None and self.timing.ratio > self.limit
        wrong = self.error_limit is not None and not (self.error is not None and self.error <= self.error_limit)
        return not (slow or wrong)


@dataclass(frozen=True)
class Comparison:
    """How many times faster one method of a case is than another, both measured in the same rounds."""

    case: str
    method: str
    other: str
    times: float
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.at_least is None else self.times >= self.at_least


@dataclass(frozen=True)
class Report:
    titles: dict[str, str]  # by case
    rows: list[Row]
    comparisons: list[Comparison]
    settings: dict[str, Any]
    environment: dict[str, Any]
    memory: list[dict[str, Any]] = field(default_factory=list)  # from benchmarks.footprint
    workers: dict[str, Any] = field(default_factory=dict)  # from benchmarks.workers

    def save(self, path: Path) -> None:
        write(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path = RESULTS) -> Report:
        stored = json.loads(path.read_text())
        rows = [Row(**row | {"timing": row["timing"] and Timing(**row["timing"])}) for row in stored.pop("rows")]
        comparisons = [Comparison(**entry) for entry in stored.pop("comparisons")]
        return Report(rows=rows, comparisons=comparisons, **stored)

    def find(self, case: str, method: str) -> Row | None:
        return next((r for r in self.rows if (r.case, r.method) == (case, method)), None)

    def of(self, case: str) -> list[Row]:
        return [r for r in self.rows if r.case == case]


def compared(case: str, wanted: Iterable[Faster], rows: Iterable[Row]) -> list[Comparison]:
    """Those comparisons of a case for which both methods were timed."""
    ratios = {r.method: r.timing.ratio for r in rows if r.timing}
    return [
        Comparison(case, w.method, w.other, ratios[w.other] / ratios[w.method], w.at_least)
        for w in wanted
        if w.method in ratios and w.other in ratios
    ]


def store(path: Path, **sections: Any) -> None:
    """Replace sections of a stored report by new ones."""
    stored = json.loads(path.read_text())
    write(path, json.dumps(stored | sections, indent=1) + "\n")


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
