"""Ops that pick entries by their size: sorting, maxima, medians.

The order is that of the means, `y = x[π(m)]`, so each result has the variance of the entry that was picked. That is
exact to first order, and too certain where two means lie within a standard deviation of one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.entries.shape import _named
from propagauss.rules.facts import state
from propagauss.rules.registry import Signature, rule

aten = torch.ops.aten
NOTE = "routed by the order of the means"


def _picked(op: Any) -> Callable[..., tuple[Gaussian, Tensor]]:
    """For an op that returns values along a dimension and where they were."""

    signature = Signature(op)

    def pick(x: Gaussian, *args: Any, **kwargs: Any) -> tuple[Gaussian, Tensor]:
        given = signature.named((x, *args), kwargs)
        values, indices = op(x.mean, *args, **kwargs)
        return _gathered(x, values, indices, given["dim"]), indices

    return _named(pick, op)


def _gathered(x: Gaussian, values: Tensor, indices: Tensor, dim: int) -> Gaussian:
    """`x` at the places `indices` along a dimension, which may be left out of the result."""
    gone = indices.dim() < x.mean.dim()
    places = indices.unsqueeze(dim) if gone else indices

    def route(t: Tensor) -> Tensor:
        found = t.gather(dim, places)
        return found.squeeze(dim) if gone else found

    return x.mapped(values, route)


for _op in (
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.kthvalue.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.cummax.default,
    aten.cummin.default,
):
    rule(_op, note=NOTE)(_picked(_op))
rule(aten.max.dim, note="routed by the largest mean")(_picked(aten.max.dim))
rule(aten.min.dim, note="routed by the smallest mean")(_picked(aten.min.dim))
state(aten.max.dim, aten.min.dim, aten.median.dim, aten.amax.default, aten.amin.default, reduces=True)


@rule(aten.msort.default, note=NOTE)
def msort(x: Gaussian) -> Gaussian:
    values, indices = x.mean.sort(0)
    return _gathered(x, values, indices, 0)


def _extreme_value(op: Any) -> Callable[..., Gaussian]:
    """Over several dimensions: one after the other, whose order does not matter."""
    pick = torch.max if op is aten.amax.default else torch.min

    def extreme(x: Gaussian, dim: Any = (), keepdim: bool = False) -> Gaussian:
        dims = [dim] if isinstance(dim, int) else list(dim) or list(range(x.mean.dim()))
        for d in sorted((d % max(x.mean.dim(), 1) for d in dims), reverse=True):
            values, indices = pick(x.mean, d, keepdim)
            x = _gathered(x, values, indices, d)
        return x

    return _named(extreme, op)


rule(aten.amax.default, note="routed by the largest mean")(_extreme_value(aten.amax.default))
rule(aten.amin.default, note="routed by the smallest mean")(_extreme_value(aten.amin.default))


@rule(aten.aminmax.default, note="routed by the smallest and the largest mean")
def aminmax(x: Gaussian, *, dim: int | None = None, keepdim: bool = False) -> tuple[Gaussian, ...]:
    dims = () if dim is None else (dim,)
    return tuple(_extreme_value(op)(x, dims, keepdim) for op in (aten.amin.default, aten.amax.default))


def _of_all(op: Any, place: Callable[[Tensor], Tensor]) -> Callable[..., Gaussian]:
    """One entry of the whole tensor; `place` finds it in the flat means."""

    def pick(x: Gaussian) -> Gaussian:
        index = place(x.mean.flatten())
        return x.mapped(op(x.mean), lambda t: t.flatten().gather(0, index.reshape(1)).squeeze(0))

    return _named(pick, op)


rule(aten.max.default, note="routed by the largest mean")(_of_all(aten.max.default, torch.argmax))
rule(aten.min.default, note="routed by the smallest mean")(_of_all(aten.min.default, torch.argmin))
rule(aten.median.default, note=NOTE)(_of_all(aten.median.default, lambda t: t.median(0).indices))
rule(aten.nanmedian.default, note=NOTE)(_of_all(aten.nanmedian.default, lambda t: t.nanmedian(0).indices))
