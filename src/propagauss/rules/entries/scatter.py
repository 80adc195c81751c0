"""Writing into a tensor: `y = A x + B s`, where `A` keeps entries of `x` and `B` puts, or adds, entries of `s`.

Linear in both together, with coefficients 0 and 1, so exact: `var_y = A v_x + B v_s` for independent `x` and `s`. Which
places are written is decided by indices and masks, which are certain. The diagonal structure forgets that one entry
written to several places is the same random number there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.elementwise.arithmetic import independent_sum, stretched, where
from propagauss.rules.entries.shape import _named
from propagauss.rules.registry import Built, Signature, Site, builder, named, rule

aten = torch.ops.aten
NOTE = "exact; what is written counts as independent of the rest"


def linear_together(
    op: Signature,
    given: dict[str, Any],
    parts: tuple[str, ...],
    constants: tuple[str, ...] = (),
    factor: str | None = None,
) -> Gaussian:
    """An op that is linear in the arguments `parts` together, with coefficients 0, 1 and `factor`.

    Each part goes through the op alone, with zeros for the other parts and for the numbers that `constants` names.
    """
    values = {name: mean_of(value) for name, value in given.items()}
    mean = op.call(values)
    zeros = {n: torch.zeros_like(values[n]) if isinstance(values[n], Tensor) else 0 for n in (*parts, *constants)}
    squares = {} if factor is None else {factor: values[factor] ** 2}
    moved = []
    for name in parts:
        part = given[name]
        if isinstance(part, Gaussian):
            alone = {**values, **zeros}
            moved.append(
                part.mapped(
                    mean,
                    lambda t, alone=alone, name=name: op.call({**alone, name: t}),
                    lambda v, alone=alone, name=name: op.call({**alone, **squares, name: v}),
                )
            )
    return independent_sum(mean, moved)


def _written(op: Any, *settings: Any) -> Callable[..., Gaussian]:
    signature = Signature(op)

    def write(*args: Any, **kwargs: Any) -> Gaussian:
        return linear_together(signature, signature.named(args, kwargs), *settings)

    return _named(write, op)


for _op, *_settings in (
    (aten.masked_fill.Scalar, ("self",), ("value",)),
    (aten.index_fill.int_Scalar, ("self",), ("value",)),
    (aten.index_copy.default, ("self", "source")),
    (aten.index_add.default, ("self", "source"), (), "alpha"),
    (aten.scatter.value, ("self",), ("value",)),
    (aten.scatter.src, ("self", "src")),
    (aten.scatter_add.default, ("self", "src")),
    (aten.slice_scatter.default, ("self", "src")),
    (aten.select_scatter.default, ("self", "src")),
    (aten.diagonal_scatter.default, ("self", "src")),
):
    rule(_op, note=NOTE)(_written(_op, *_settings))


@rule(aten.masked_fill.Tensor, note=NOTE)
def masked_fill(x: Any, mask: Tensor, value: Any) -> Gaussian:
    mean = torch.masked_fill(mean_of(x), mask, mean_of(value))
    # not the op itself, which is slow on many covariance rows
    return where(mask, stretched(value, mean.shape), stretched(x, mean.shape)).with_mean(mean)


@rule(aten.index_fill.int_Tensor, note=NOTE)
def index_fill(x: Any, dim: int, index: Tensor, value: Any) -> Gaussian:
    # by a mask: the op itself is wrong for many values at once (torch.vmap, 2.13)
    return masked_fill(x, torch.zeros_like(mean_of(x), dtype=torch.bool).index_fill(dim, index, True), value)


# -- writes that depend on a setting


def _by_site(op: Any, function: Callable[..., Gaussian], given: dict[str, Any], note: str) -> Built:
    return Built(function, tuple(given[a.name] for a in op._schema.arguments), note)


@builder(aten.index_put.default)
def build_index_put(site: Site) -> Built | None:
    """Left to the general rule: uncertain values at places that a mask finds (which sample they go to depends on the
    mask, too much for the full structure), and one value added to a place more than once (its coefficient is unknown).
    """
    given = named(site)
    indices = [i for i in given["indices"] if i is not None]
    masked = any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)
    if site.is_random(given["values"]):
        if site.options.full and masked:
            return None
        if given["accumulate"] and not masked and _repeats(site, given):
            return None
    return _by_site(site.op, index_put, given, NOTE)


def _repeats(site: Site, given: dict[str, Any]) -> bool:
    """Whether the values are fewer than the places that they go to."""
    base = torch.empty(site.shape(given["self"]), device="meta")
    places = [
        slice(None) if i is None else torch.empty(site.shape(i), dtype=torch.long, device="meta")
        for i in given["indices"]
    ]
    return torch.Size(site.shape(given["values"])).numel() < base[tuple(places)].numel()


index_put = _written(aten.index_put.default, ("self", "values"))


@builder(aten.scatter.reduce, aten.scatter.value_reduce)
def build_scatter_in_place(site: Site) -> Built | None:
    given = named(site)
    if given["reduce"] != "add":
        return None
    if "value" in given:
        return _by_site(site.op, scatter_value_add, given, NOTE)
    return Built(scatter_add, tuple(given[name] for name in ("self", "dim", "index", "src")), NOTE)


scatter_add = _written(aten.scatter_add.default, ("self", "src"))


def scatter_value_add(x: Gaussian, dim: int, index: Tensor, value: float, reduce: str) -> Gaussian:
    return x.with_mean(aten.scatter(x.mean, dim, index, value, reduce=reduce))


@builder(aten.scatter_reduce.two)
def build_scatter_reduce(site: Site) -> Built | None:
    given = named(site)
    function, note = {
        "sum": (scatter_sum, NOTE),
        "mean": (scatter_mean, NOTE),
        "amax": (scatter_extreme, "routed by the largest mean"),
        "amin": (scatter_extreme, "routed by the smallest mean"),
    }.get(given["reduce"], (None, ""))
    return None if function is None else _by_site(site.op, function, given, note)


scatter_sum = _written(aten.scatter_reduce.two, ("self", "src"))
scatter_sum.__name__ = "scatter_sum"


def scatter_mean(x: Any, dim: int, index: Tensor, src: Any, reduce: str, include_self: bool = True) -> Gaussian:
    """The sum over the entries that meet at a place, divided by their number `n`: `var = Σ v / n²`"""
    total: Any = scatter_sum(x, dim, index, src, "sum", include_self=include_self)
    m, s = mean_of(x), mean_of(src)
    count = torch.scatter_reduce(torch.ones_like(m), dim, index, torch.ones_like(s), "sum", include_self=include_self)
    mean = torch.scatter_reduce(m, dim, index, s, "mean", include_self=include_self)
    return total.scaled(mean, count.reciprocal())


def scatter_extreme(x: Any, dim: int, index: Tensor, src: Any, reduce: str, include_self: bool = True) -> Gaussian:
    """The entry with the largest (smallest) mean of those that meet; equal ones share, as in PyTorch's derivative."""
    m, s = mean_of(x), mean_of(src)
    mean = torch.scatter_reduce(m, dim, index, s, reduce, include_self=include_self)
    read = tuple(slice(0, size) for size in index.shape)
    theirs = (s[read] == mean.gather(dim, index)).to(m.dtype)
    untouched = torch.ones_like(m).scatter(dim, index, 0.0)
    own = (m == mean).to(m.dtype) if include_self else untouched
    share = own.scatter_add(dim, index, theirs).reciprocal()
    coefficient = theirs * share.gather(dim, index)
    parts = []
    if isinstance(x, Gaussian):
        parts.append(x.scaled(mean, own * share))
    if isinstance(src, Gaussian):
        nothing = torch.zeros_like(m)

        def put(t: Tensor, factor: Tensor) -> Tensor:
            return nothing.scatter_add(dim, index, t[read] * factor)

        parts.append(src.mapped(mean, lambda t: put(t, coefficient), lambda v: put(v, coefficient.square())))
    return independent_sum(mean, parts)


@builder(aten.masked_scatter.default)
def build_masked_scatter(site: Site) -> Built | None:
    """The full structure cannot tell which sample an entry of the source goes to: left to the general rule."""
    given = named(site)
    if site.options.full and site.is_random(given["source"]):
        return None
    return _by_site(site.op, masked_scatter, given, NOTE)


def masked_scatter(x: Any, mask: Tensor, source: Any) -> Gaussian:
    """The entries of `source`, in order, at the places of the mask, in order."""
    m, s = mean_of(x), mean_of(source)
    mean = torch.masked_scatter(m, mask, s)
    parts = []
    if isinstance(x, Gaussian):
        parts.append(x.mapped(mean, lambda t: t.masked_fill(mask, 0)))
    if isinstance(source, Gaussian):
        wide = mask.expand_as(mean)
        place = (wide.flatten().cumsum(0) - 1).clamp(min=0).reshape(mean.shape)
        parts.append(source.mapped(mean, lambda t: torch.where(wide, t.flatten()[place], 0)))
    return independent_sum(mean, parts)
