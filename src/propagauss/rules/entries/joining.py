"""Parts put side by side: `cat`, `stack` and their relatives. Linear in all parts, which count as independent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, common, mean_of
from propagauss.rules.entries.shape import _named
from propagauss.rules.facts import state
from propagauss.rules.registry import rule

aten = torch.ops.aten

JOINS = [
    aten.cat.default,
    aten.concat.default,
    aten.stack.default,
]

MORE_JOINS = [
    aten.concatenate.default,
    aten.hstack.default,
    aten.vstack.default,
    aten.row_stack.default,
    aten.dstack.default,
    aten.column_stack.default,
    aten.block_diag.default,
]


def _columns(tensors: Sequence[Tensor]) -> Tensor:
    """`column_stack`, which cannot be vectorised."""
    return joined([t.reshape(t.numel(), 1) if t.dim() < 2 else t for t in tensors], 1)


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`cat`; in files the sum of its parts beside zeros, as itself, vectorised, would fix open sizes (torch 2.13)."""
    if not torch.compiler.is_exporting():
        return torch.cat(list(tensors), dim)
    parts = [t for t in tensors if t.dim() > 1 or t.shape[0] > 0]  # an empty vector goes with all shapes
    sizes = [t.shape[dim] for t in parts]
    behind = [0, 0] * (parts[0].dim() - 1 - dim % parts[0].dim()) if parts else []
    padded = [aten.constant_pad_nd(t, [*behind, sum(sizes[:i]), sum(sizes[i + 1 :])], 0) for i, t in enumerate(parts)]
    return functools.reduce(torch.add, padded) if parts else torch.cat(list(tensors), dim)


# what is vectorised over the rows of a covariance in place of the op
_VECTORISED = {**dict.fromkeys((*JOINS[:2], aten.concatenate.default), joined), aten.column_stack.default: _columns}


def _joining(op: Any) -> Callable[..., Gaussian]:
    vectorised: Any = _VECTORISED.get(op, op)

    def join(tensors: Sequence[Gaussian | Tensor], *args: Any, **kwargs: Any) -> Gaussian:
        mean, kind = op([mean_of(t) for t in tensors], *args, **kwargs), common(tensors)
        inner = vectorised if kind.joint else op
        return Gaussian.of(kind, mean, kind.joined(mean, lambda each: inner(each, *args, **kwargs), tensors))

    return _named(join, op)


for _op in JOINS:
    rule(_op, note="parts taken as independent", joins=True, in_pieces=_VECTORISED.get(_op))(_joining(_op))
for _op in MORE_JOINS:
    rule(_op, note="parts taken as independent")(_joining(_op))
state(joined, joins=True)

concatenated = _joining(aten.cat.default)
