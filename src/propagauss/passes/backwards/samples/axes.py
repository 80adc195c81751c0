"""Which values have samples, and where: what a parameter's sensitivity must be kept apart by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, fx

from propagauss.nodes import depends, hint, reached
from propagauss.tracing.trace import Traced

_REPEATS = (torch.ops.aten.expand.default, torch.ops.aten.repeat.default, torch.ops.aten.broadcast_to.default)


class Axis(NamedTuple):
    """The dimension of a value that counts samples, and how many of its rows belong to one of them.

    Rows are in the order `[before, samples, rows / before]`.
    """

    dim: int
    rows: int
    before: int = 1


PLAIN = Axis(0, 1)  # samples first, one row for each


def axes(traced: Traced) -> dict[fx.Node, Axis]:
    """The axis of every value that has samples; values that are missing are the same for all.

    Where sizes are fixed a size cannot tell, so what was made of inputs counts, what was made of nothing (the first
    states of recurrent layers), and what was repeated as often as there are samples (class tokens).
    """
    starts = [n for n in traced.inputs if n is not None]
    starts += [n for n in traced.graph.nodes if n.op == "call_function" and _is_for_all(n, traced.batch)]
    candidates = traced.graph.nodes if traced.batch_is_dynamic else reached(traced.graph, starts)
    found = {}
    for node in candidates:
        value = node.meta.get("val")
        value = value[0] if isinstance(value, (tuple, list)) and len(value) else value
        axis = _axis(value, traced) if isinstance(value, Tensor) else None
        if axis is not None:
            found[node] = axis
    return found


def _is_for_all(node: fx.Node, batch: int) -> bool:
    """Whether a value that does not depend on inputs was made with a row for each sample."""
    if not node.all_input_nodes:
        return True
    source = node.args[0] if node.target in _REPEATS else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
        return False
    before, after = source.meta["val"].shape, node.meta["val"].shape
    return len(after) > 0 and hint(after[0]) == batch and (len(before) < len(after) or hint(before[0]) == 1)


def _axis(value: Tensor, traced: Traced) -> Axis | None:
    for d, size in enumerate(value.shape):
        if traced.batch_is_dynamic:
            if depends(size, traced.batch_symbols):
                return Axis(d, max(hint(size) // traced.batch, 1))
        elif d == 0 and hint(size) % traced.batch == 0:
            return Axis(0, hint(size) // traced.batch)
    return None


def fronted(t: Tensor, dim: int, rows: int, before: int = 1, lead: int = 0) -> Tensor:
    """Samples first, after `lead` other dimensions; the rows of a sample, if several, stay where they were."""
    at = lead + dim
    if before > 1:
        return t.unflatten(at, (before, -1, rows // before)).movedim(at + 1, lead)
    t = t.unflatten(at, (-1, rows)) if rows > 1 else t
    return t.movedim(at, lead) if dim else t


def apart(t: Tensor, dim: int, rows: int, before: int = 1, lead: int = 0) -> Tensor:
    """The rows of each sample in a dimension of their own, behind one for samples at the same place."""
    at = lead + dim
    if before > 1:
        return t.unflatten(at, (before, -1, rows // before)).movedim(at + 1, at).flatten(at + 1, at + 2)
    return t.unflatten(at, (-1, rows))
