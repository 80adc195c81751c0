"""Whose rows are whose: found by changing samples of the example and looking at what changes.

A size such as `2 B` says that a sample has two rows, not which: `flatten(0, 1)` puts the rows of a sample beside one
another, `cat([x, y])` and time-major sequences put those of different samples there. In general rows are
`[before, B, after]`. Where no such order fits, samples depend on each other, and the value has no place for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from propagauss.inputs.samples import Batch, patterns
from propagauss.nodes import is_assertion, reached
from propagauss.passes.backwards.samples.axes import Axis
from propagauss.passes.samples_apart import some, with_other_parameters
from propagauss.tracing.trace import Traced

UNSEEN = 0
TOLERANCE = 1e-3  # of a typical change: the same product may be rounded otherwise


class _Variants(tuple[Any, ...]):
    """A value on the example, and with each set of its samples changed."""


def observed(traced: Traced, axes: Mapping[fx.Node, Axis], active: AbstractSet[fx.Node]) -> dict[fx.Node, Axis]:
    """The axes with the order of their rows; those of values that mix samples are left out.

    So are uncertain values that are the same for all samples of the example, if they are so with other parameters too.
    """
    batch = some(traced)
    if batch.size < 2 or not any(batch.have):
        return dict(axes)
    first = _looked_at(traced, axes, batch)
    if not first.unseen:
        return first.found
    second = _looked_at(with_other_parameters(traced), axes, batch)
    seen = {n: axis for n, axis in first.found.items() if n not in first.unseen}
    hidden = first.unseen - (second.unseen & active)
    return seen | {n: axis for n, axis in second.found.items() if n in hidden}


def _looked_at(traced: Traced, axes: Mapping[fx.Node, Axis], batch: Batch) -> _Watch:
    sets = patterns(batch.size)
    try:
        return _watched(traced, axes, sets, [batch.values, *(batch.changed(mask) for mask in sets)])
    except Exception:  # of a model that does not take such inputs
        return _watched(traced, axes, sets, [batch.values, *(batch.changed(mask, gently=True) for mask in sets)])


def _watched(traced: Traced, axes: Mapping[fx.Node, Axis], sets: list[Tensor], variants: list[list[Any]]) -> _Watch:
    have = Batch.of(variants[0], len(sets[0])).have
    inputs = [n for n in traced.inputs if n is not None]
    columns = zip(have, zip(*variants, strict=True), strict=True)
    given = dict(zip(inputs, (_Variants(each) if has else each[0] for has, each in columns), strict=True))
    watch = _Watch(traced, axes, sets)
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        watch.run(*(traced.constants.get(n.name, given.get(n)) for n in places), enable_io_processing=False)
    return watch


class _Watch(fx.Interpreter):
    def __init__(self, traced: Traced, axes: Mapping[fx.Node, Axis], sets: list[Tensor]):
        super().__init__(torch.nn.Module(), graph=traced.graph)
        self.axes, self.sets = axes, sets
        self.found = dict(axes)
        self.unseen = set[fx.Node]()  # values of several rows for each sample in which nothing changes
        self.of_inputs = reached(traced.graph, [n for n in traced.inputs if n is not None])

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_assertion(target):
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda v: isinstance(v, _Variants))
        if not any(isinstance(leaf, _Variants) for leaf in leaves):
            return super().call_function(target, args, kwargs)
        results = []
        for i in range(1 + len(self.sets)):
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
            before = _before(value, axis, self.sets)
            if before == UNSEEN:
                before = 1
                if n in self.of_inputs:
                    self.unseen.add(n)
            if before is None:
                del self.found[n]
            else:
                self.found[n] = axis._replace(before=before)
        return result


def _before(value: _Variants, axis: Axis, sets: list[Tensor]) -> int | None:
    """How many groups of rows have all samples in each; None if samples change rows of others, `UNSEEN` if no rows."""
    rows = len(sets[0]) * axis.rows
    if any(v.shape != value[0].shape for v in value) or value[0].shape[axis.dim] != rows:
        return None
    if not value[0].numel():  # the part of a value that is left beside one that was written to
        return 1
    changed = [_changed(value[0], other, axis.dim) for other in value[1:]]
    if axis.rows > 1 and not any(rows.any() for rows in changed):
        return UNSEEN
    for before in range(1, axis.rows + 1):
        if axis.rows % before:
            continue
        shape = before, -1, axis.rows // before
        if not any(rows.reshape(shape)[:, ~mask].any() for rows, mask in zip(changed, sets, strict=True)):
            return before
    return None


def _changed(old: Tensor, new: Tensor, dim: int) -> Tensor:
    """Which rows along a dimension are not what they were."""
    if not (old.is_floating_point() or old.is_complex()):
        return (old != new).movedim(dim, 0).flatten(1).any(1) if old.dim() > 1 else old != new
    change = (new - old).abs()
    lost = torch.where(old.isfinite() & ~new.isfinite(), math.inf, change.nan_to_num(posinf=0.0))
    change = lost.movedim(dim, 0).reshape(old.shape[dim], -1).amax(1)
    rounding = old.abs().nan_to_num(posinf=0.0).amax() * torch.finfo(old.dtype).eps
    seen = change[(change > 0) & change.isfinite()]
    typical = seen.median() if seen.numel() else 0.0  # not the largest: one sample may be much larger
    return change > TOLERANCE * (typical + rounding)
