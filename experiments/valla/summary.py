"""Rows of several seeds as one: means and standard deviations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from experiments.frame.experiment import Record
from experiments.valla.ways import Way

METRICS = {
    "accuracy": "accuracy",
    "nlpd": "NLL",
    "ece": "ECE",
    "entropy": "OOD, entropy",
    "variance": "OOD, variance",
    "information": "OOD, information",
}


@dataclass(frozen=True)
class Summary:
    """All seeds of one set: for each way to predict, its row for each of them."""

    records: Sequence[Record]
    rows: Mapping[Way, Sequence[Mapping[str, Any]]]

    @property
    def seeds(self) -> int:
        return len(self.records)

    @property
    def ways(self) -> list[Way]:
        return list(self.rows)

    def values(self, way: Way, metric: str) -> list[float]:
        return [row[metric] for row in self.rows[way] if row.get(metric) is not None]

    def mean(self, way: Way, metric: str) -> float:
        return statistics.mean(self.values(way, metric))

    def text(self, way: Way, metric: str) -> str:
        values = self.values(way, metric)
        if not values:
            return ""
        digits = 3 if metric in ("entropy", "variance", "information") else 4
        stddev = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.{digits}f}{stddev}"

    def gap(self, way: Way) -> tuple[float, float]:
        """NLL minus that of temperature scaling: mean over seeds, and the mean standard error over test images."""
        pairs = [row["against"] for row in self.rows[way]]
        return statistics.mean(p[0] for p in pairs), statistics.mean(p[1] for p in pairs)

    def difference(self, way: Way) -> str:
        mean, error = self.gap(way)
        return f"{mean:+.4f} ± {error:.4f}"


def summaries(records: Mapping[str, Record]) -> dict[str, Summary]:
    """By set, in the order of the records."""
    found: dict[str, Summary] = {}
    for name in ("mnist", "fashion_mnist"):
        mine = [r for r in records.values() if r.get("set") == name]
        if mine:
            rows: dict[Way, list[Mapping[str, Any]]] = {}
            for record in mine:
                for row in record["rows"]:
                    rows.setdefault(Way(*(row[f.name] for f in fields(Way))), []).append(row)
            found[name] = Summary(mine, rows)
    return found


def cost(record: Record | None, way: Way, batch: int) -> float | None:
    """Multiples of a plain forward pass."""
    if not way.engine:
        return 1.0
    if record is None:
        return None
    sizes = record["batches"]
    times = sizes.get(str(batch)) or sizes[max(sizes, key=int)]
    return times[f"{way.posterior}, {way.engine}, {way.link}"]["median"]


def cost_of(record: Record | None, way: Way, batch: int) -> str:
    found = cost(record, way, batch)
    return "" if found is None else f"{found:.1f}"
