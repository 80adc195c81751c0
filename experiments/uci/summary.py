"""The stored folds of one UCI set, taken together: mean and standard deviation over folds, which methods are best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.frame.experiment import Record
from experiments.report import html
from experiments.uci.data import SETS
from experiments.uci.methods import bold, pooled

PAPER = {  # the methods that the paper compares, by posterior
    "MFVI": ("MFVI sampling", "MFVI ours"),
    "LA": ("LA sampling", "LA GLM", "LA ours"),
}
FITTED = {  # each with one number fitted on the validation part
    "MFVI": ("MFVI sampling, scale fitted", "MFVI GLM, scale fitted", "MFVI ours"),
    "LA": ("MAP", "LA sampling, scale fitted", "LA GLM, scale fitted", "LA ours"),
}
_POINTS = {"nlpd": "losses", "rmse": "errors"}


class Summary:
    """All folds of one set."""

    def __init__(self, folds: Sequence[Record]):
        self.folds = sorted(folds, key=lambda f: f["fold"])
        self.name: str = self.folds[0]["set"]
        self.methods: list[str] = list(self.folds[0]["scores"])

    def values(self, metric: str, method: str) -> list[float]:
        """One for each fold."""
        return [f["scores"][method][metric] for f in self.folds]

    def mean(self, metric: str, method: str) -> float:
        return statistics.fmean(self.values(metric, method))

    def median(self, metric: str, method: str) -> float:
        return statistics.median(self.values(metric, method))

    def text(self, metric: str, method: str) -> str:
        """Mean and standard deviation over folds, as the paper prints them."""
        values = self.values(metric, method)
        stddev = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.fmean(values):.3f} ± {stddev:.3f}"

    def bold(self, metric: str, methods: Sequence[str]) -> dict[str, bool]:
        """By a paired t-test over the test points of all folds."""
        n, mean, covariance = pooled([f[_POINTS[metric]] for f in self.folds])
        rows = [self.methods.index(m) for m in methods]
        return dict(zip(methods, bold(n, mean[rows], covariance[np.ix_(rows, rows)]), strict=True))

    def bold_by_folds(self, metric: str, methods: Sequence[str]) -> dict[str, bool]:
        """By a paired t-test over the folds."""
        values = np.array([self.values(metric, m) for m in methods])
        if values.shape[1] < 2:
            return dict.fromkeys(methods, True)
        found = bold(values.shape[1], values.mean(1), np.cov(values, bias=True))
        return dict(zip(methods, found, strict=True))

    def at_bound(self, method: str) -> int:
        """Folds in which the fitted scale ended at the end of its range."""
        return sum(bool(f["scores"][method]["at_bound"]) for f in self.folds)

    @property
    def tested(self) -> int:
        return sum(f["parts"]["test"] for f in self.folds)


def summaries(records: Mapping[str, Record]) -> list[Summary]:
    """In the order of the paper's table."""
    folds = {n: [r for r in records.values() if r["set"] == n and "hyperparameters" in r] for n in SETS}
    return [Summary(f) for f in folds.values() if f]


def bold_counts(sets: Sequence[Summary], metric: str, contests: Mapping[str, Sequence[str]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for methods in contests.values():
        for s in sets:
            for method, is_bold in s.bold(metric, methods).items():
                counts[method] = counts.get(method, 0) + is_bold
    return counts


def mean_ranks(sets: Sequence[Summary], contests: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Of the NLPD, among the methods of a contest; 1 is the best, equal ones share the mean of their places."""
    ranks: dict[str, list[float]] = {}
    for methods in contests.values():
        for s in sets:
            for method, rank in _ranks({m: s.mean("nlpd", m) for m in methods}).items():
                ranks.setdefault(method, []).append(rank)
    return {m: statistics.fmean(r) for m, r in ranks.items()}


def _ranks(values: Mapping[str, float]) -> dict[str, float]:
    shown: dict[str, Any] = {m: round(v, 6) for m, v in values.items()}
    return {
        m: 1 + sum(o < v for o in shown.values()) + (sum(o == v for o in shown.values()) - 1) / 2
        for m, v in shown.items()
    }


def lines(sets: Sequence[Summary], groups: Mapping[str, Sequence[str]], ours: Callable[[str], bool]) -> list[html.Line]:
    """NLPDs: methods in rows, sets in columns, then how often a method is bold among its group, and its mean rank."""
    counts, ranks = bold_counts(sets, "nlpd", groups), mean_ranks(sets, groups)
    marks = {(s.name, m): b for s in sets for group in groups.values() for m, b in s.bold("nlpd", group).items()}
    found, before = [], ""
    for method in sets[0].methods:
        cells = [html.Cell(f"{s.mean('nlpd', method):.3f}", bold=marks.get((s.name, method), False)) for s in sets]
        count = f"{counts[method]}/{len(sets)}" if method in counts else ""
        rank = f"{ranks[method]:.1f}" if method in ranks else ""
        kind = method.split()[0]
        found.append(html.Line([method, *cells, count, rank], ours=ours(method), start=kind != before))
        before = kind
    return found
