"""A Laplace posterior adds up what each sample tells on its own: samples of a batch may not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.inputs.samples import others, with_another


def check_samples_apart(forward: Callable[[Any], Tensor], x: Any, output: Tensor, size: int) -> None:
    """Raise if another first or last sample changes the outputs `[B, ...]` of the others."""
    if size < 2 or output.shape[:1] != (size,):
        return
    for sample in (0, -1):
        try:
            with torch.no_grad():
                changed = forward(pytree.tree_map(partial(with_another, sample=sample, batch=size), x))
        except Exception:  # of a model that does not take samples that are made up
            continue
        if changed.shape == output.shape and changed.isfinite().all():
            check_independence(*(others(f, sample).reshape(size - 1, -1) for f in (changed, output.detach())))


def check_independence(alone: Tensor, together: Tensor) -> None:
    """Raise unless samples on their own, or among others, give the outputs `[b, C]` that they gave in the batch."""
    size = float(together.abs().amax())
    tolerance = 1e4 * torch.finfo(together.dtype).eps * size
    if alone.shape != together.shape or float((alone - together).abs().amax()) > tolerance:
        raise InputError(
            "the outputs of a sample depend on the rest of its batch, so it has no gradient of its own: a model that "
            "mixes samples has no Laplace posterior; if an input without a batch dimension is as long as the batch, "
            "use another batch size"
        )
