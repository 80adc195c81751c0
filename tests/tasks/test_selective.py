"""The risk-coverage plot: a line for each method, and what it cannot draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import propagauss as pg
from propagauss.metrics import aurc
from propagauss.tasks import selective


def test_a_line_for_each_method() -> None:
    confidence, correct = torch.tensor([0.9, 0.5, 0.7]), torch.tensor([True, False, True])
    figure = selective.plot({"a": (confidence, correct), "b": (-confidence, correct.numpy())})
    (axis,) = figure.axes
    first, second = axis.lines
    np.testing.assert_allclose(first.get_ydata(), [0, 0, 1 / 3])
    np.testing.assert_allclose(second.get_ydata(), [1, 1 / 2, 1 / 3])
    assert first.get_label() == f"a: AURC {aurc(confidence, correct):.4f}"


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (None, "nothing to plot"),
        ({}, "nothing to plot"),
        ({"a": torch.ones(2)}, r"'a' is a tensor of shape \(2,\); give a pair"),
        ({"a": (torch.ones(2), torch.ones(3))}, "both must have shape"),
    ],
)
def test_errors(groups: Any, match: str) -> None:
    with pytest.raises(pg.InputError, match=match):
        selective.plot(groups)
