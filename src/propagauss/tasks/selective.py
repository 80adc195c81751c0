"""Selective prediction: which error rate is left if the least confident predictions go to somebody else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from propagauss import metrics
from propagauss.checks import kind
from propagauss.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(groups: Mapping[str, tuple[Any, Any]]) -> Figure:
    """Risk-coverage curves, `{"MAP": (confidence, correct), ...}`, with their AURC; needs matplotlib.

    `confidence` and `correct` are as in `propagauss.metrics.risk_coverage`.
    """
    from propagauss.tasks.plots import steps

    if not isinstance(groups, Mapping) or not groups:
        raise InputError('there is nothing to plot: give a dictionary such as {"MAP": (confidence, correct)}')
    curves = {}
    for title, pair in groups.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"'{title}' is {kind(pair)}; give a pair (confidence, correct)")
        coverage, risk = metrics.risk_coverage(*pair)
        curves[f"{title}: AURC {risk.mean():.4f}"] = (coverage.numpy(), risk.numpy())
    return steps(curves, "coverage", "error rate")
