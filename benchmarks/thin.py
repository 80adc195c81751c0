"""What the cases with thin factors for the spreads share: `pg.streamline(..., variance_tolerance=...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import propagauss as pg
from benchmarks.case import Predict
from propagauss.passes.low_rank_variances import deviation

TOLERANCE = 0.05


def described(make: Callable[[], pg.Streamlined]) -> pg.Streamlined:
    """The network that `make` returns, with what its plan says of the ranks as the note of the row."""
    net = make()
    net.note = net.plan.notes[-1]  # type: ignore[assignment]
    return net


def sd_error(exact: Callable[[], Predict], inputs: Callable[[], Any], predict: Predict) -> float:
    """Mean relative error of the standard deviations, on inputs that the ranks were not chosen on."""
    x = inputs()
    return deviation(exact()(x), predict(x))
