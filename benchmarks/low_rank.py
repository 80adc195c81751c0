"""What the cases with low-rank variances share: `pg.streamline(..., variance_tolerance=...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import propagauss as pg
from benchmarks.case import Predict

TOLERANCE = 0.05


def described(make: Callable[[], pg.Streamlined]) -> pg.Streamlined:
    """The network that `make` returns, with what its plan says of the ranks as the note of the row."""
    net = make()
    net.note = net.plan.notes[-1]  # type: ignore[assignment]
    return net


def sd_error(exact: Callable[[], Predict], inputs: Callable[[], Any], predict: Predict) -> float:
    """Mean relative error of the standard deviations, on inputs that the ranks were not chosen on."""
    x = inputs()
    true, given = (net(x).variance.double().sqrt() for net in (exact(), predict))
    some = true > 0
    return (given[some] / true[some] - 1).abs().mean().item()
