"""Whose rows are whose: found by changing one sample of the example and looking at what changes.

A size such as `2 B` says that a sample has two rows, not which: `flatten(0, 1)` puts the rows of a sample beside one
another, `cat([x, y])` and time-major sequences put those of different samples there. In general rows are
`[before, B, after]`. Where no such order fits, samples depend on each other, and the value has no place for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from propagauss.nodes import is_assertion
from propagauss.passes.backwards.samples.axes import Axis
from propagauss.tracing.trace import Traced

TOLERANCE = 1e-3  # of the largest change: the same product may be rounded otherwise


class _Variants(tuple[Any, ...]):
    """A value on the example, with another first sample, and with another last one."""


def observed(traced: Traced, axes: Mapping[fx.Node, Axis]) -> dict[fx.Node, Axis]:
    """The axes with the order of their rows; those of values that mix samples are left out."""
    values = {n: v for n, v in zip(traced.inputs, traced.example, strict=True) if n is not None}
    if traced.batch < 2 or not any(_has_samples(v, traced.batch) for v in values.values()):
        return dict(axes)
    given = {n: _variants(v, traced.batch) if _has_samples(v, traced.batch) else v for n, v in values.items()}
    watch = _Watch(traced, axes)
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        watch.run(*(traced.constants.get(n.name, given.get(n)) for n in places), enable_io_processing=False)
    return watch.found


class _Watch(fx.Interpreter):
    def __init__(self, traced: Traced, axes: Mapping[fx.Node, Axis]):
        super().__init__(torch.nn.Module(), graph=traced.graph)
        self.axes, self.batch = axes, traced.batch
        self.found = dict(axes)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_assertion(target):
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda v: isinstance(v, _Variants))
        if not any(isinstance(leaf, _Variants) for leaf in leaves):
            return super().call_function(target, args, kwargs)
        results = []
        for i in range(3):
            picked = [leaf[i] if isinstance(leaf, _Variants) else leaf for leaf in leaves]
            results.append(super().call_function(target, *pytree.tree_unflatten(picked, spec)))
        if isinstance(results[0], (tuple, list)):  # parts, one of which is picked later
            return [_Variants(parts) for parts in zip(*results, strict=True)]
        return _Variants(results)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        value = result[0] if isinstance(result, list) and result else result
        if n in self.axes and isinstance(value, _Variants) and isinstance(value[0], Tensor):
            axis = self.axes[n]
            before = _before(value, axis, self.batch)
            if before is None:
                del self.found[n]
            else:
                self.found[n] = axis._replace(before=before)
        return result


def _before(value: _Variants, axis: Axis, batch: int) -> int | None:
    """How many groups of rows have all samples in each; None if a sample changes rows of others."""
    if any(v.shape != value[0].shape for v in value):
        return None
    first, last = (_changed(value[0], other, axis.dim) for other in value[1:])
    for before in range(1, axis.rows + 1):
        if axis.rows % before:
            continue
        shape = before, batch, axis.rows // before
        if not first.reshape(shape)[:, 1:].any() and not last.reshape(shape)[:, :-1].any():
            return before
    return None


def _changed(old: Tensor, new: Tensor, dim: int) -> Tensor:
    """Which rows along a dimension are not what they were."""
    if not (old.is_floating_point() or old.is_complex()):
        return (old != new).movedim(dim, 0).flatten(1).any(1) if old.dim() > 1 else old != new
    change = (new - old).abs().nan_to_num().movedim(dim, 0).reshape(old.shape[dim], -1).amax(1)
    rounding = old.abs().nan_to_num(posinf=0.0).amax() * torch.finfo(old.dtype).eps
    return change > TOLERANCE * (change.amax() + rounding)


def _has_samples(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch


def _variants(value: Tensor, batch: int) -> _Variants:
    first = torch.cat([_other(value[0], value[-1]).unsqueeze(0), value[1:]])
    last = torch.cat([value[:-1], _other(value[-1], value[0]).unsqueeze(0)])
    return _Variants((value, first, last))


def _other(sample: Tensor, neighbour: Tensor) -> Tensor:
    """Another sample that the model takes as well: nearer to a neighbour, or turned round, or a little smaller."""
    if not sample.is_floating_point():
        turned = sample.flip(-1) if sample.dim() else sample
        return turned if torch.equal(sample, neighbour) else neighbour
    middle = (sample + neighbour) / 2
    return 0.9 * sample if torch.equal(middle, sample) else middle
