"""Fewer columns for dense outputs, such as a class for each pixel: their curvature, without one pass for each output.

    E[(Σ_c ε_c s_c) (Σ_c ε_c s_c)ᵀ] = Σ_c s_c s_cᵀ,    ε_c = ±1 at random, independent of each other

So columns that are added up with random signs give the same curvature on average, whatever the model is. What remains
between different columns averages out over the samples, as each has signs of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EXACT = 1024  # columns; up to here every one is taken
FEW = 64  # of more, so many sums are taken

Column = Callable[[int], Tensor]


def few(column: Column, count: int, seed: int) -> tuple[Column, int]:
    """Columns `[B, C]` and how many there are: those given, or sums of them if there are very many."""
    if count <= EXACT:
        return column, count
    first = column(0)
    generator = torch.Generator().manual_seed(seed)
    group = (torch.randperm(count, generator=generator) % FEW).tolist()
    signs = 2.0 * torch.randint(0, 2, (len(first), count), generator=generator) - 1
    signs = signs.to(first)
    sums = first.new_zeros(FEW, *first.shape)
    for c in range(count):
        sums[group[c]].addcmul_(signs[:, c : c + 1], column(c))
    return lambda c: sums[c], FEW
