"""Which comparisons are part of an elementwise function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from propagauss.rules.elementwise.comparisons import decisions, fusable_comparison
from rules.cases import Call


def gated(h: Tensor) -> Tensor:
    return h.relu() * (h > 1)


def _comparison(function: Callable[..., Any], *inputs: Tensor) -> list[fx.Node]:
    program = torch.export.export(Call(function), inputs or (torch.ones(2, 3),), strict=False)
    found = decisions(program.graph)
    return [n for n in program.graph.nodes if n in found]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x * (x > 0),
        lambda x: (x > 0).float().sum(1),
        lambda x: torch.where((x > 0) & (x < 1), x.tanh(), 0.0),
        lambda x: x.tanh() * (x.exp() > 2),
        lambda x: torch.where(x > x.tanh(), x, torch.zeros(())),
        lambda x: gated(x.sum(1, keepdim=True) + x),
    ],
)
def test_fusable_comparisons(function: Callable[[Tensor], Tensor]) -> None:
    found = _comparison(function)
    assert found and all(fusable_comparison(node) for node in found)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x > 0,
        lambda x: (x > 0).sum(1),
        lambda x: torch.where(x > 0, x.flip(1), 0.0),
        lambda x: torch.where(x[:, :1] > 0, x, 0.0),
        lambda x: x * (x.sum(1, keepdim=True) > 0),
        lambda x: (x * (x > 0), x > 0),
        lambda x: torch.where((x > 0) & (x.flip(1) > 0), x, 0.0),
    ],
)
def test_other_comparisons(function: Callable[[Tensor], Tensor]) -> None:
    assert not all(fusable_comparison(node) for node in _comparison(function))


def test_comparison_with_another_value() -> None:
    """A value beside the compared one must be certain, which only the caller knows."""
    pair = (torch.ones(2, 3), torch.ones(2, 3))
    (node,) = _comparison(lambda x, y: torch.where(x > 0, x, y), *pair)
    assert not fusable_comparison(node)
    first, other = (n for n in node.graph.nodes if n.op == "placeholder")
    assert fusable_comparison(node, lambda n: n is other)
    assert not fusable_comparison(node, lambda n: n is first)
