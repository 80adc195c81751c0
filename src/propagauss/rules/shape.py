"""Ops that move, copy, pick or add up entries: linear, so exact.

Moving entries moves their variances the same way. Sums need squared coefficients: `Var[Σ x_i] = Σ v_i` and
`Var[mean] = Σ v_i / n²` for a diagonal covariance; the full structure pushes both sides of the covariance through.
Copies made by `expand` or `repeat` are the same random number; only the full structure remembers that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.arithmetic import independent_sum
from propagauss.rules.registry import rule

aten = torch.ops.aten

MOVES = [
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.swapaxes.default,
    aten.slice.Tensor,
    aten.narrow.default,
    aten.select.int,
    aten.index_select.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.expand.default,
    aten.expand_as.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.tile.default,
    aten.flip.default,
    aten.roll.default,
    aten.diagonal.default,
    aten.tril.default,
    aten.triu.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
    aten.lift_fresh_copy.default,
]

SPLITS = [
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.tensor_split.sections,
    aten.unbind.int,
]


# a reshape where the op insists on strides that a stacked covariance does not have
def as_complex(x: Tensor) -> Tensor:
    """Pairs of numbers as complex ones, whatever their layout in memory."""
    return torch.view_as_complex(x.contiguous())


STRIDE_FREE = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.view_as_complex.default: as_complex,
}
# under a batch of covariance rows these must not see, or change, the memory layout
_IDENTITY = {aten.contiguous.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default}


def _named(function: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Generated code shows the op's name rather than that of the closure."""
    function.__name__ = str(op).replace("aten.", "").replace(".", "_")
    return function


def _move(op: Any) -> Callable[..., Gaussian]:
    inner: Any = STRIDE_FREE.get(op, op)

    def move(x: Gaussian, *args: Any, **kwargs: Any) -> Gaussian:
        if op in _IDENTITY:
            return x
        return x.mapped(inner(x.mean, *args, **kwargs), lambda t: inner(t, *args, **kwargs))

    return _named(move, op)


def _split(op: Any) -> Callable[..., tuple[Gaussian, ...]]:
    def split(x: Gaussian, *args: Any, **kwargs: Any) -> tuple[Gaussian, ...]:
        if not x.is_full:
            spreads = op(x.variance, *args, **kwargs)
            return tuple(Gaussian.diagonal(m, v) for m, v in zip(op(x.mean, *args, **kwargs), spreads, strict=True))
        return tuple(
            x.mapped(m, lambda t, i=i: op(t, *args, **kwargs)[i]) for i, m in enumerate(op(x.mean, *args, **kwargs))
        )

    return _named(split, op)


for _op in MOVES:
    rule(_op, note="exact")(_move(_op))
for _op in SPLITS:
    rule(_op, note="exact")(_split(_op))


@rule(operator.getitem, note="exact")
def getitem(x: Any, index: Any) -> Any:
    return x[index]


@rule(aten.cat.default, aten.concat.default, note="parts taken as independent")
def cat(parts: Sequence[Gaussian | Tensor], dim: int = 0) -> Gaussian:
    return _join(lambda tensors: torch.cat(tensors, dim), parts)


@rule(aten.stack.default, note="parts taken as independent")
def stack(parts: Sequence[Gaussian | Tensor], dim: int = 0) -> Gaussian:
    return _join(lambda tensors: torch.stack(tensors, dim), parts)


def _join(join: Callable[[list[Tensor]], Tensor], parts: Sequence[Gaussian | Tensor]) -> Gaussian:
    means = [p.mean if isinstance(p, Gaussian) else p for p in parts]
    mean = join(means)
    full = any(isinstance(p, Gaussian) and p.is_full for p in parts)
    if not full:
        spreads = [p.variance if isinstance(p, Gaussian) else torch.zeros_like(p) for p in parts]
        return Gaussian.diagonal(mean, join(spreads))
    zeros = [torch.zeros_like(m) for m in means]
    placed = []
    for i, part in enumerate(parts):
        if isinstance(part, Gaussian):
            placed.append(part.mapped(mean, lambda t, i=i: join([*zeros[:i], t, *zeros[i + 1 :]])))
    return independent_sum(mean, placed)


@rule(aten.sum.default, aten.sum.dim_IntList, note="exact")
def add_up(x: Gaussian, dim: Any = None, *args: Any, **kwargs: Any) -> Gaussian:
    def total(t: Tensor) -> Tensor:
        return t.sum() if dim is None else t.sum(dim, *args, **kwargs)

    return x.mapped(total(x.mean), total)


@rule(aten.cumsum.default, note="exact sums, taken as independent of one another")
def cumulative(x: Gaussian, dim: int, **kwargs: Any) -> Gaussian:
    return x.mapped(x.mean.cumsum(dim, **kwargs), lambda t: t.cumsum(dim, **kwargs))


@rule(aten.mean.default, aten.mean.dim, note="exact")
def average(x: Gaussian, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Gaussian:
    def mean(t: Tensor) -> Tensor:
        return t.mean(**kwargs) if not dim and dim != 0 else t.mean(dim, keepdim, **kwargs)

    dims = range(len(x.shape)) if not dim and dim != 0 else [dim] if isinstance(dim, int) else dim
    count = torch.Size(x.shape[d] for d in dims).numel()
    return x.mapped(mean(x.mean), mean, lambda v: mean(v) / count)


@rule(aten.constant_pad_nd.default, note="exact")
def constant_pad(x: Gaussian, pad: list[int], value: float = 0) -> Gaussian:
    return x.mapped(aten.constant_pad_nd(x.mean, pad, value), lambda t: aten.constant_pad_nd(t, pad, 0))


@rule(aten.pad.default, note="exact")
def pad(x: Gaussian, sizes: list[int], mode: str = "constant", value: float | None = None) -> Gaussian:
    return x.mapped(aten.pad(x.mean, sizes, mode, value), lambda t: aten.pad(t, sizes, mode, None))


@rule(aten.masked_fill.Scalar, note="exact")
def masked_fill(x: Gaussian, mask: Tensor, value: float) -> Gaussian:
    return x.mapped(x.mean.masked_fill(mask, value), lambda t: t.masked_fill(mask, 0))


def _cast(op: Any) -> Callable[..., Gaussian]:
    def cast(x: Gaussian, *args: Any, **kwargs: Any) -> Gaussian:
        return x.to(dtype=op(x.mean.new_empty(0), *args, **kwargs).dtype)

    return _named(cast, op)


for _op in (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.type_as.default):
    rule(_op, note="exact")(_cast(_op))


@rule(aten.embedding.default, note="exact")
def embedding(weight: Gaussian, indices: Tensor, *args: Any, **kwargs: Any) -> Gaussian:
    return weight.mapped(aten.embedding(weight.mean, indices), lambda t: aten.embedding(t, indices))


@rule(aten.einsum.default, note="operands taken as independent: exact moments")
def einsum(equation: str, operands: Sequence[Gaussian | Tensor], **kwargs: Any) -> Gaussian:
    """Linear in each operand: variances go through with the other operands squared."""
    values = [o.mean if isinstance(o, Gaussian) else o for o in operands]
    random = [i for i, o in enumerate(operands) if isinstance(o, Gaussian)]
    mean = torch.einsum(equation, *values)
    first = operands[random[0]]
    assert isinstance(first, Gaussian)
    if len(random) == 1:
        i = random[0]

        def through(t: Tensor, others: list[Tensor]) -> Tensor:
            return torch.einsum(equation, *others[:i], t, *others[i + 1 :])

        return first.mapped(mean, lambda t: through(t, values), lambda t: through(t, [v.square() for v in values]))
    # E[product²] - (E product)² for independent factors, entry by entry
    second = [
        v.square() + o.variance if isinstance(o, Gaussian) else v.square()
        for v, o in zip(values, operands, strict=True)
    ]
    first_squared = [v.square() for v in values]
    return Gaussian.diagonal(
        mean, (torch.einsum(equation, *second) - torch.einsum(equation, *first_squared)).clamp(min=0)
    )


def _extreme(pick: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(x: Gaussian, dim: int, keepdim: bool = False) -> tuple[Gaussian, Tensor]:
        index = pick(x.mean, dim, keepdim=True).indices

        def route(t: Tensor) -> Tensor:
            picked = t.gather(dim, index)
            return picked if keepdim else picked.squeeze(dim)

        return x.mapped(route(x.mean), route), index if keepdim else index.squeeze(dim)

    return extreme


rule(aten.max.dim, note="routed by the largest mean")(_named(_extreme(torch.max), aten.max.dim))
rule(aten.min.dim, note="routed by the smallest mean")(_named(_extreme(torch.min), aten.min.dim))


def _extreme_value(pick: Callable[..., Any]) -> Callable[..., Gaussian]:
    def extreme(x: Gaussian, dim: Any = (), keepdim: bool = False) -> Gaussian:
        dims = [dim] if isinstance(dim, int) else list(dim)
        for d in sorted((d % x.mean.dim() for d in dims), reverse=True):
            x = _extreme(pick)(x, d, keepdim)[0]
        return x

    return extreme


rule(aten.amax.default, note="routed by the largest mean")(_named(_extreme_value(torch.max), aten.amax.default))
rule(aten.amin.default, note="routed by the smallest mean")(_named(_extreme_value(torch.min), aten.amin.default))
