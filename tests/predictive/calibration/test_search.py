"""The search for one positive number."""

import math

import pytest

from propagauss.predictive.calibration import minimise


def test_minimise_finds_the_lower_of_two_minima():
    def objective(s: float) -> float:
        t = math.log(s)
        return -math.exp(-((t + 8) ** 2)) - 2 * math.exp(-((t - 5) ** 2))

    assert minimise(objective, 1e-3) == pytest.approx(math.exp(5), rel=1e-4)


def test_minimise_stays_where_nothing_is_better():
    assert minimise(lambda s: 1.0, 0.7) == 0.7


def test_minimise_at_the_ends():
    assert minimise(lambda s: s, 1.0) == pytest.approx(1e-6, rel=1e-3)
    assert minimise(lambda s: -s, 1.0) == pytest.approx(1e6, rel=1e-3)
