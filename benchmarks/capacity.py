"""The numbers of docs/capacity.md, from a stored report."""

from __future__ import annotations

from typing import Any

from benchmarks import mlp, transformers, workers
from benchmarks.case import PLAIN
from benchmarks.low_rank import TOLERANCE
from benchmarks.report import markdown_table, number, size, times
from benchmarks.results import Report, Row

MILLION = 1_000_000
LOW_RANK = f"variance_tolerance={TOLERANCE}"
VALUES = "values of the last two blocks, head"
# case, samples in a batch, and the methods to show
COSTS: list[tuple[str, int, tuple[str, ...]]] = [
    *(
        (
            f"mlp/diagonal/{batch}",
            batch,
            (
                PLAIN,
                "streamlined",
                f"streamlined, {LOW_RANK}",
                mlp.SUQ,
                mlp.GLM,
                "our GLM baseline",
                f"laplace-torch, {mlp.SAMPLES} samples",
                f"our {mlp.SAMPLES} samples",
            ),
        )
        for batch in mlp.BATCHES
    ),
    *((f"onnx/mlp/{batch}", batch, (PLAIN, "streamlined")) for batch in mlp.BATCHES),
    ("resnet/32", 32, (PLAIN, "every parameter", f"every parameter, {LOW_RANK}")),
    (
        "transformers/vit",
        1,
        (
            PLAIN,
            VALUES,
            f"{VALUES}: our GLM baseline",
            f"{VALUES}: our {transformers.SAMPLES} samples",
            transformers.ALL,
            f"{transformers.ALL}, {LOW_RANK}",
        ),
    ),
]
MISSING = "Not measured yet: `{}`."


def sections(report: Report) -> dict[str, str]:
    """By the name of the marker."""
    return {
        "cost": cost(report),
        "workers": scaling(report),
        "memory": memory(report),
        "full": full(report),
    }


def cost(report: Report) -> str:
    lines = []
    for case, batch, methods in COSTS:
        for method in methods:
            row = report.find(case, method)
            if row and row.timing:
                title = report.titles[case].removesuffix("; Bayesian:")
                lines.append((title, method, times(row.timing.ratio), *_cost(report, row, batch)))
    if not lines:
        return MISSING.format("python -m benchmarks --json benchmarks/results.json")
    header = ("model", "predictor", "ratio", "per million predictions", "per second")
    env = report.environment
    where = f"One core of {env['cpu']}, {env['date']}:"
    return f"{where}\n\n{markdown_table(header, lines, left=2)}"


def _cost(report: Report, row: Row, batch: int) -> tuple[str, str]:
    """Core time of a million predictions, and predictions per second of one core."""
    plain = report.find(row.case, PLAIN)
    assert plain and plain.timing and row.timing
    seconds = plain.timing.seconds * row.timing.ratio / batch
    return long(MILLION * seconds), _rate(1 / seconds)


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def long(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.3g} {unit}" if seconds < 1000 * length else f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.3g} seconds"


def scaling(report: Report) -> str:
    if not report.workers:
        return MISSING.format("python -m benchmarks.workers --json benchmarks/results.json")
    found = report.workers
    text = (
        f"Measured on a machine with {found['cores']} cores (load {found['load']} at the end), {found['seconds']:g} "
        "seconds a round; there is nothing here about more workers than that."
    )
    return f"{text}\n\n{workers.table(found['rows'])}"


def memory(report: Report) -> str:
    if not report.memory:
        return MISSING.format("python -m benchmarks.footprint --json benchmarks/results.json")
    lines = [_memory_line(r) for r in report.memory]
    header = ("model", "predictor", "weights", "kept", "kept / weights", "for a prediction", "whole process")
    note = (
        "*Kept*: constants of the predictor. *For a prediction*: what the process grew by while it predicted. "
        "*Whole process*: its peak beyond Python and PyTorch themselves, with the code that tracing loads."
    )
    return f"{markdown_table(header, lines, left=2)}\n\n{note}"


def _memory_line(row: dict[str, Any]) -> tuple[str, ...]:
    grown = max(row["peak"] - row["resident"], 0)
    kept = (size(row["weights"]), size(row["kept"]), f"{number(row['kept'] / row['weights'])}x")
    return row["model"], row["predictor"], *kept, size(grown), size(row["peak"])


def full(report: Report) -> str:
    """Diagonal against full covariance, on the same posterior."""
    lines = []
    for case, title in report.titles.items():
        methods = [f'streamlined, covariance="{structure}"' for structure in ("diagonal", "full")]
        rows = [report.find(case, method) for method in methods]
        if case.startswith("mlp/") and all(r and r.timing and r.extra_bytes is not None for r in rows):
            cells = [c for r in rows if r and r.timing for c in (times(r.timing.ratio), f"+{size(r.extra_bytes or 0)}")]
            lines.append((title, *cells))
    if not lines:
        return MISSING.format("python -m benchmarks --json benchmarks/results.json")
    return markdown_table(("model", "diagonal: time", "memory", "full: time", "memory"), lines)
