"""The small functions at both ends of the backward walk: where it starts, and what it ends in."""

from __future__ import annotations

from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.adjoints.forms import weighted


def seed(rows: Tensor | None, whole: Tensor, y: Tensor, event: list[int]) -> Tensor:
    """Rows `[K, n]` of the identity, all of them if None, for every sample: `[K, B, *event]`."""
    rows = (whole if rows is None else rows).reshape(-1, 1, *event)
    return rows.expand(-1, y.shape[0], *event)


def weight_rows(rows: Tensor | None, w: Tensor, y: Tensor) -> Tensor:
    """The same pulled back through `y = x Wᵀ + b`: rows of the weight, for every sample."""
    return (w if rows is None else rows @ w).unsqueeze(1).expand(-1, y.shape[0], -1)


def seed_unless_whole(rows: Tensor | None, y: Tensor, event: list[int]) -> Tensor | None:
    """Nothing in place of the whole identity, for layers that need not multiply by it."""
    return None if rows is None else seed(rows, rows, y, event)


def of_input(g: Tensor, x: Gaussian, full: bool) -> Tensor:
    """`g C gᵀ` for an uncertain input with covariance `C`."""
    rows = g.flatten(2)
    if not x.is_full:
        return weighted(rows, x.variance.flatten(1), full)
    moved = rows.transpose(0, 1) @ x.covariance  # [B, K, n]
    if full:
        return moved @ rows.permute(1, 2, 0)
    return (moved * rows.transpose(0, 1)).sum(-1)
