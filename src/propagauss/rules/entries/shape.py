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

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.facts import state, stride_free
from propagauss.rules.registry import Signature, rule

aten = torch.ops.aten

# the same entries in the same order
RESHAPES = [
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
]

MOVES = [
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.moveaxis.int,
    aten.moveaxis.intlist,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.adjoint.default,
    aten.mH.default,
    aten.matrix_H.default,
    aten.ravel.default,
    aten.atleast_1d.default,
    aten.atleast_2d.default,
    aten.atleast_3d.default,
    aten.slice.Tensor,
    aten.narrow.default,
    aten.select.int,
    aten.index_select.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.expand.default,
    aten.expand_as.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.broadcast_to.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.repeat_interleave.self_Tensor,
    aten.tile.default,
    aten.flip.default,
    aten.fliplr.default,
    aten.flipud.default,
    aten.rot90.default,
    aten.roll.default,
    aten.unfold.default,
    aten.take.default,
    aten.take_along_dim.default,
    aten.diagonal.default,
    aten.linalg_diagonal.default,
    aten.diag.default,
    aten.diagflat.default,
    aten.diag_embed.default,
    aten.tril.default,
    aten.triu.default,
    aten.clone.default,
]

# in evaluation mode
DROPOUTS = [
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
]

# under a batch of covariance rows these must not see, or change, the memory layout
IDENTITIES = [
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
]

SPLITS = [
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
]

MORE_SPLITS = [
    aten.hsplit.int,
    aten.hsplit.array,
    aten.vsplit.int,
    aten.vsplit.array,
    aten.dsplit.int,
    aten.dsplit.array,
    aten.unbind.int,
]


def as_complex(x: Tensor) -> Tensor:
    """Pairs of numbers as complex ones, whatever their layout in memory."""
    return torch.view_as_complex(x.contiguous())


# a stacked covariance does not have the strides that these insist on
state(aten.view.default, aten._unsafe_view.default, stride_free=aten.reshape.default)
state(aten.view_as.default, stride_free=aten.reshape_as.default)
state(aten.view_as_complex.default, stride_free=as_complex)
state(as_complex, linear_in=(0,))


def _named(function: Callable[..., Any], op: Any) -> Callable[..., Any]:
    """Generated code shows the op's name rather than that of the closure."""
    function.__name__ = str(op).replace("aten.", "").replace(".", "_")
    return function


def _move(op: Any) -> Callable[..., Gaussian]:
    inner = stride_free(op)

    def move(x: Gaussian, *given: Any, **settings: Any) -> Gaussian:
        args, kwargs = [mean_of(a) for a in given], {name: mean_of(a) for name, a in settings.items()}
        return x.mapped(inner(x.mean, *args, **kwargs), lambda t: inner(t, *args, **kwargs))

    return _named(move, op)


def _same(op: Any) -> Callable[..., Gaussian]:
    def same(x: Gaussian, *given: Any, **settings: Any) -> Gaussian:
        return x

    return _named(same, op)


def _split(op: Any) -> Callable[..., tuple[Gaussian, ...]]:
    def split(x: Gaussian, *args: Any, **kwargs: Any) -> tuple[Gaussian, ...]:
        return x.split(op(x.mean, *args, **kwargs), lambda t: op(t, *args, **kwargs))

    return _named(split, op)


for _op in RESHAPES:
    rule(_op, note="exact", moves_entries=True, keeps_order=True)(_move(_op))
for _op in MOVES:
    rule(_op, note="exact", moves_entries=True)(_move(_op))
for _op in DROPOUTS:
    rule(_op, note="exact", moves_entries=True, drops_out=True, training_flag=(2, "train"))(_move(_op))
for _op in IDENTITIES:
    rule(_op, note="exact", moves_entries=True)(_same(_op))
for _op in SPLITS:
    rule(_op, note="exact", moves_entries=True, splits=True)(_split(_op))
for _op in MORE_SPLITS:
    rule(_op, note="exact", moves_entries=True)(_split(_op))
state(aten.clone.default, aten.alias.default, aten.detach.default, sums=True)
# what `detach` returns is as uncertain as what it takes; `contiguous` stays, as what follows may need its layout
state(aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, returns_input=True)
state(aten.view.default, aten.reshape.default, aten._unsafe_view.default, returns_input=True)
state(aten.expand.default, aten.expand_as.default, returns_input=True)


@rule(operator.getitem, note="exact", moves_entries=True)
def getitem(x: Any, index: Any) -> Any:
    return x[index]


def _each(op: Any) -> Callable[..., tuple[Gaussian, ...]]:
    """For an op with one result per tensor, which depends on that tensor only."""

    def each(tensors: Sequence[Gaussian | Tensor], **kwargs: Any) -> tuple[Gaussian, ...]:
        values = [mean_of(t) for t in tensors]
        like = next(t for t in tensors if isinstance(t, Gaussian))

        def copies(i: int, t: Tensor) -> Tensor:
            return op([*values[:i], t, *values[i + 1 :]], **kwargs)[i]

        return tuple(
            x.mapped(m, lambda t, i=i: copies(i, t)) if isinstance(x, Gaussian) else like.certain(m)
            for i, (x, m) in enumerate(zip(tensors, op(values, **kwargs), strict=True))
        )

    return _named(each, op)


for _op in (aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing):
    rule(_op, note="exact")(_each(_op))


# sums have no coefficient but 1, which is its own square
for _op in (aten.sum.default, aten.sum.dim_IntList):
    rule(_op, note="exact", linear_in=(0,))(_move(_op))
rule(aten.trace.default, note="exact")(_move(aten.trace.default))
rule(aten.cumsum.default, note="exact sums (diagonal: they count as independent)", linear_in=(0,))(
    _move(aten.cumsum.default)
)
state(aten.sum.dim_IntList, reduces=True)


def _average(op: Any) -> Callable[..., Gaussian]:
    signature = Signature(op)

    def average(x: Gaussian, *args: Any, **kwargs: Any) -> Gaussian:
        """`Var[Σ x_i / n] = Σ v_i / n²`"""
        dim = signature.named((x, *args), kwargs).get("dim")
        dims = range(len(x.shape)) if dim is None or dim == [] else dim
        count = torch.Size(x.shape[d] for d in dims).numel()
        return x.mapped(
            op(x.mean, *args, **kwargs), lambda t: op(t, *args, **kwargs), lambda v: op(v, *args, **kwargs) / count
        )

    return _named(average, op)


for _op in (aten.mean.default, aten.mean.dim):
    rule(_op, note="exact", linear_in=(0,))(_average(_op))
state(aten.mean.dim, reduces=True)


@rule(aten.constant_pad_nd.default, note="exact")
def constant_pad(x: Gaussian, pad: list[int], value: float = 0) -> Gaussian:
    return x.mapped(aten.constant_pad_nd(x.mean, pad, value), lambda t: aten.constant_pad_nd(t, pad, 0))


@rule(aten.pad.default, note="exact")
def pad(x: Gaussian, sizes: list[int], mode: str = "constant", value: float | None = None) -> Gaussian:
    return x.mapped(aten.pad(x.mean, sizes, mode, value), lambda t: aten.pad(t, sizes, mode, None))


def _cast(op: Any) -> Callable[..., Gaussian]:
    def cast(x: Gaussian, *given: Any, **settings: Any) -> Gaussian:
        args, kwargs = [mean_of(a) for a in given], {name: mean_of(a) for name, a in settings.items()}
        return x.to(dtype=op(x.mean.new_empty(0), *args, **kwargs).dtype)

    return _named(cast, op)


for _op in (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default):
    rule(_op, note="exact", casts=True)(_cast(_op))
for _op in (aten.to.device, aten.to.other):
    rule(_op, note="exact")(_cast(_op))
state(aten.to.dtype, aten.type_as.default, returns_input=True)

# the other argument gives a shape or a type, nothing else
state(aten.expand_as.default, aten.view_as.default, aten.reshape_as.default, at_mean=(1,))
state(aten.type_as.default, aten.to.other, at_mean=(1,))


def looked_up(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`embedding`, which cannot be exported where it is vectorised (torch 2.13)."""
    return weight[indices]


state(looked_up, linear_in=(0,))


@rule(aten.embedding.default, note="exact", linear_in=(0,), in_pieces=looked_up)
def embedding(weight: Gaussian, indices: Tensor, *args: Any, **kwargs: Any) -> Gaussian:
    return weight.mapped(aten.embedding(weight.mean, indices), lambda t: looked_up(t, indices))
