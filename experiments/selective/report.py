"""The section of the report about selective prediction, and what its numbers show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.frame.experiment import Record, Section
from experiments.report import html
from experiments.selective.methods import (
    AS_IT_IS,
    ENSEMBLE,
    FACTORS,
    FITTED,
    JOINT,
    LINEARISED,
    MEAN,
    MOMENTS,
    PLAIN,
    SAMPLES,
    STREAMLINED,
    TEMPERATURE,
)

RISKS = (0.005, 0.01, 0.05)
SETS = {
    "fashion_mnist": "Fashion-MNIST, MLP (10 epochs)",
    "pneumoniamnist": "PneumoniaMNIST, MLP",
    "cifar10": "CIFAR-10 (9,000 training images), residual CNN",
    "mrpc": "MRPC, head on MiniLM",
    "wic": "WiC, head on MiniLM",
}
ENGINES = (STREAMLINED, LINEARISED)
HEAD = [
    "method",
    "accuracy",
    "100 AURC",
    *(f"coverage at {100 * risk:g}% risk" for risk in RISKS),
    "100 (AURC - plain)",
    "100 (AURC - ensemble)",
    "100 AURC by epistemic",
    "NLPD",
    "time / plain pass",
]


class Rows:
    """The rows of one set over all its seeds."""

    def __init__(self, records: Sequence[Record]):
        self.records = records
        self.names = [row["name"] for row in records[0]["rows"]]
        self._rows = {name: [_row(r, name) for r in records] for name in self.names}

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        return self._rows[name]

    def first(self, name: str) -> dict[str, Any]:
        return self._rows[name][0]

    def mean(self, name: str, metric: str) -> float:
        return statistics.fmean(row[metric] for row in self._rows[name])

    def aurc(self, name: str) -> tuple[float, float]:
        """And its standard error: over seeds, or over test inputs if that is larger."""
        return _with_error([(row["aurc"], row["aurc_error"]) for row in self._rows[name]])

    def gap(self, name: str, other: str) -> tuple[float, float]:
        return _with_error([tuple(row["against"][other]) for row in self._rows[name]])

    def coverage(self, name: str, at: int) -> float:
        return statistics.fmean(row["coverage"][at] for row in self._rows[name])

    def epistemic(self, name: str) -> float | None:
        if self.first(name)["epistemic"] is None:
            return None
        return statistics.fmean(row["epistemic"]["aurc"] for row in self._rows[name])

    def cost(self, name: str) -> float | None:
        """Of a prediction, in plain passes; one for what is a single pass."""
        method = self.first(name)["method"]
        method = STREAMLINED if method in (FACTORS, MOMENTS) else method
        found = [record["costs"].get(method, 1.0) for record in self.records]
        return statistics.median(found)


def _row(record: Record, name: str) -> dict[str, Any]:
    return next(row for row in record["rows"] if row["name"] == name)


def _with_error(pairs: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    values, errors = zip(*pairs, strict=True)
    over_inputs = statistics.fmean(errors)
    over_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), max(over_inputs, over_seeds)


def by_set(records: Mapping[str, Record]) -> dict[str, Rows]:
    """The sets that were run."""
    found = {name: [r for r in records.values() if r["set"] == name] for name in SETS}
    return {name: Rows(sorted(some, key=lambda r: r["seed"])) for name, some in found.items() if some}


def section(records: dict[str, Record]) -> Section:
    known = by_set(records)
    body = html.paragraph(_NOTE) + "".join(f"<h3>{SETS[n]}</h3>{_table(n, rows)}" for n, rows in known.items())
    missing = [SETS[n] for n in SETS if n not in known]
    body += html.paragraph(f"Not run: {', '.join(missing)}.") if missing else ""
    lines = [line for name, rows in known.items() for line in readings(SETS[name], rows)]
    return Section(body, [*summary(known), *lines], headline(known))


_NOTE = (
    "A model may leave inputs to somebody else. Predictions are sorted by confidence, the largest probability; the "
    "risk at a coverage is the error rate among that share of the most confident. AURC is the mean risk over all "
    "coverages; coverage at a risk is the largest share that keeps the risk. All Gaussians have the mean-field link. "
    "As it is: the posterior as it was fitted (Laplace: prior precision by marginal likelihood). Calibrated: scale and "
    "temperature by `calibrate` (of sampling: the scale of least NLPD), on validation data. One ensemble, of "
    "seeds 0 to 4, stands beside the networks of every seed. A factor per layer, and expected second moments in layer "
    "norms, are ideas of Calibrated Variance Propagation (arXiv 2606.16214); the library does not have them."
)


def _table(name: str, rows: Rows) -> str:
    lines, before = [], ""
    best = min(rows.names, key=lambda n: rows.aurc(n)[0])
    for row in rows.names:
        kind = rows.first(row)["posterior"]
        ours = rows.first(row)["method"] in (STREAMLINED, JOINT, LINEARISED)
        lines.append(html.Line(_cells(rows, row, best), ours=ours, start=kind != before))
        before = kind
    record = rows.records[0]
    seeds = f"{len(rows.records)} seeds" if len(rows.records) > 1 else "one seed"
    caption = (
        f"{record['test']:,} test inputs, {seeds}. ±: the larger of the standard errors over seeds and over resampled "
        "test inputs; differences are paired. Bold: the least AURC. By epistemic: sorted by minus the mutual "
        "information of class and weights. Time: processor time on one batch, by LA; of samples and ensembles too."
    )
    return html.table(HEAD, lines, caption)


def _cells(rows: Rows, name: str, best: str) -> list[html.Cell | str]:
    aurc, error = rows.aurc(name)
    epistemic, cost = rows.epistemic(name), rows.cost(name)
    return [
        html.Cell(name, number=False),
        f"{rows.mean(name, 'accuracy'):.4f}",
        html.Cell(f"{100 * aurc:.3f} ± {100 * error:.3f}", bold=name == best),
        *(f"{rows.coverage(name, i):.3f}" for i in range(len(RISKS))),
        _signed(rows, name, PLAIN),
        _signed(rows, name, ENSEMBLE),
        "–" if epistemic is None else f"{100 * epistemic:.3f}",
        f"{rows.mean(name, 'nlpd'):.4f}",
        "" if cost is None else f"{cost:.3g}",
    ]


def _signed(rows: Rows, name: str, other: str) -> str:
    if name == other:
        return ""
    mean, error = rows.gap(name, other)
    return f"{100 * mean:+.3f} ± {100 * error:.3f}"


# -- readings


def readings(where: str, rows: Rows) -> list[str]:
    """What wins, by how much and at what cost; and what loses."""
    best = min(rows.names, key=lambda n: rows.aurc(n)[0])
    lines = [
        f"{where}: the least AURC is {_percent(rows, best)}, of {best} ({_times(rows, best)}); plain model "
        f"{_percent(rows, PLAIN)}, temperature scaling {_percent(rows, TEMPERATURE)}, deep ensemble "
        f"{_percent(rows, ENSEMBLE)} ({_times(rows, ENSEMBLE)})."
    ]
    for kind in ("LA", "IVON"):
        names = [n for n in rows.names if rows.first(n)["posterior"] == kind]
        told = [f"{_short(n)} {_percent(rows, n)} ({_verdict(*rows.gap(n, PLAIN))})" for n in names if _told(rows, n)]
        lines.append(f"{where}, {kind}, 100 AURC and whether it is told from the plain model: {', '.join(told)}.")
    own = f"IVON, {MEAN}"
    told = [f"{_short(n)} {_change(rows.aurc(n)[0], rows.aurc(own)[0]):+.1%}" for n in rows.names if _of_ivon(rows, n)]
    lines.append(
        f"{where}, IVON, AURC against that of its own mean weights ({_percent(rows, own)}; their accuracy is "
        f"{rows.mean(own, 'accuracy'):.3f}, that of the plain model {rows.mean(PLAIN, 'accuracy'):.3f}): "
        f"{', '.join(told)}."
    )
    return lines


def _of_ivon(rows: Rows, name: str) -> bool:
    return rows.first(name)["posterior"] == "IVON" and _told(rows, name)


def _told(rows: Rows, name: str) -> bool:
    return rows.first(name)["method"] in (SAMPLES, *ENGINES, FACTORS)


def _short(name: str) -> str:
    return name.partition(", ")[2]


def _percent(rows: Rows, name: str) -> str:
    return f"{100 * rows.aurc(name)[0]:.3f}"


def _times(rows: Rows, name: str) -> str:
    cost = rows.cost(name)
    return "one pass" if cost is None or cost < 1.1 else f"{cost:.3g} times a plain pass"


def _verdict(gap: float, error: float) -> str:
    return "better" if gap < -2 * error else "worse" if gap > 2 * error else "not told apart"


def summary(known: Mapping[str, Rows]) -> list[str]:
    """Over all sets: how often each method is told from the plain model and from the ensemble."""
    if not known:
        return []
    lines = []
    for kind, method in ((k, m) for k in ("LA", "IVON") for m in (SAMPLES, *ENGINES)):
        name = f"{kind}, {method}, {FITTED}"
        for other in (PLAIN, ENSEMBLE):
            verdicts = [_verdict(*rows.gap(name, other)) for rows in known.values()]
            change = [_change(rows.aurc(name)[0], rows.aurc(other)[0]) for rows in known.values()]
            counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("better", "not told apart", "worse"))
            lines.append(
                f"{name}, against the {other} on {len(known)} sets: {counts}; AURC {statistics.fmean(change):+.1%} on "
                "average."
            )
    return [*lines, *_ideas(known)]


def _change(one: float, other: float) -> float:
    return one / other - 1 if other else 0.0


def _ideas(known: Mapping[str, Rows]) -> list[str]:
    """Whether factors per layer, or expected second moments, help streamlining."""
    lines = []
    for idea in (FACTORS, MOMENTS):
        for form in (AS_IT_IS, FITTED):
            pairs = [
                (rows.aurc(f"{kind}, {idea}, {form}")[0], rows.aurc(f"{kind}, {STREAMLINED}, {form}")[0])
                for rows in known.values()
                for kind in ("LA", "IVON")
                if f"{kind}, {idea}, {form}" in rows.names
            ]
            if pairs:
                better = sum(one < other for one, other in pairs)
                change = statistics.fmean(_change(one, other) for one, other in pairs)
                lines.append(
                    f"{idea}, {form}: a lower AURC than streamlined without it in {better} of {len(pairs)} cases, "
                    f"{change:+.1%} on average."
                )
    return lines


def headline(known: Mapping[str, Rows]) -> str:
    """100 AURC and the coverage at 1% risk as a Markdown table, sets in columns."""
    if not known:
        return ""
    lines = [
        f"| 100 AURC / coverage at 1% risk | {' | '.join(SETS[n] for n in known)} |",
        "|---|" + "--:|" * len(known),
    ]
    shown = [PLAIN, TEMPERATURE, ENSEMBLE]
    shown += [f"{kind}, {m}, {FITTED}" for kind in ("LA", "IVON") for m in (SAMPLES, *ENGINES)]
    for name in shown:
        cells = [f"{_percent(rows, name)} / {rows.coverage(name, 1):.3f}" for rows in known.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
