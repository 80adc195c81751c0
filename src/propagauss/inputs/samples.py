"""Batches in which one sample is another one, to see whether the others depend on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def has_samples(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch


def with_another(value: Any, sample: int, batch: int) -> Any:
    """The first (0) or last (-1) sample replaced by one between both, or by half of it: models take these as well."""
    if not has_samples(value, batch):
        return value
    mine, theirs = value[sample], value[-1 - sample]
    if not value.is_floating_point():
        new = theirs
    elif torch.equal(mine, theirs):
        new = mine / 2
    else:
        new = (mine + theirs) / 2
    return torch.cat([new.unsqueeze(0), value[1:]] if sample == 0 else [value[:-1], new.unsqueeze(0)])


def others(value: Tensor, sample: int) -> Tensor:
    """All but the first (0) or the last (-1)."""
    return value[1:] if sample == 0 else value[:-1]
