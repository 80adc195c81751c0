"""Adjoints of ops that move entries: they move them back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from propagauss.rules.adjoints.registry import adjoint, unbroadcast, unbroadcast_per_sample
from propagauss.rules.entries import shape  # noqa: F401 (states facts about ops)
from propagauss.rules.facts import having

aten = torch.ops.aten


@adjoint(*having("keeps_order"), aten.view_as.default, aten.reshape_as.default, aten.ravel.default)
def reshaped(g: Tensor, i: int, y: Tensor, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return g.reshape(*g.shape[: g.dim() - y.dim()], *x.shape)


@adjoint(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def expanded(g: Tensor, i: int, y: Tensor, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return unbroadcast(g, g.dim() - y.dim(), x.shape)


@adjoint(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, per_sample=True)
def expanded_per_sample(g: Tensor, i: int, y: Tensor, x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return unbroadcast_per_sample(g, x.shape)


@adjoint(aten.transpose.int, aten.swapaxes.default)
def transposed(g: Tensor, i: int, y: Tensor, x: Tensor, first: int, second: int) -> Tensor:
    return g.transpose(*((d if d < 0 else d - y.dim()) for d in (first, second)))


@adjoint(aten.t.default, aten.mT.default, aten.numpy_T.default)
def matrix_transposed(g: Tensor, i: int, y: Tensor, x: Tensor) -> Tensor:
    return g.mT if y.dim() > 1 else g


@adjoint(aten.permute.default)
def permuted(g: Tensor, i: int, y: Tensor, x: Tensor, dims: list[int]) -> Tensor:
    lead = g.dim() - y.dim()
    places = [d % y.dim() for d in dims]
    return g.permute(*range(lead), *(lead + places.index(d) for d in range(y.dim())))


@adjoint(aten.select.int)
def selected(g: Tensor, i: int, y: Tensor, x: Tensor, dim: int, index: int) -> Tensor:
    dim = dim if dim < 0 else dim - x.dim()
    index = index if index >= 0 else x.shape[dim] + index
    return _padded(g.unsqueeze(dim), dim, index, x.shape[dim] - index - 1)


@adjoint(aten.slice.Tensor)
def sliced(
    g: Tensor,
    i: int,
    y: Tensor,
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    dim = dim if dim < 0 else dim - x.dim()
    size = x.shape[dim]
    start = 0 if start is None else start
    start = min(max(start + size, 0) if start < 0 else start, size)
    if step != 1:
        index = torch.arange(start, size, step, device=g.device)[: g.shape[dim]]
        zeros = g.new_zeros(1).expand(*g.shape[: g.dim() - x.dim()], *x.shape)
        return zeros.index_add(dim, index, g)
    return _padded(g, dim, start, size - start - g.shape[dim])


def _padded(g: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Zeros before and after, along one dimension."""
    pads = [0, 0] * (-1 - dim) + [before, after]
    return torch.nn.functional.pad(g, pads)


@adjoint(aten.index_select.default)
def index_selected(g: Tensor, i: int, y: Tensor, x: Tensor, dim: int, index: Tensor) -> Tensor:
    zeros = g.new_zeros(1).expand(*g.shape[: g.dim() - y.dim()], *x.shape)
    return zeros.index_add(dim if dim < 0 else dim - x.dim(), index, g)


@adjoint(aten.flip.default)
def flipped(g: Tensor, i: int, y: Tensor, x: Tensor, dims: list[int]) -> Tensor:
    return g.flip([d if d < 0 else d - x.dim() for d in dims])


@adjoint(aten.roll.default)
def rolled(g: Tensor, i: int, y: Tensor, x: Tensor, shifts: list[int], dims: list[int] = ()) -> Tensor:  # type: ignore[assignment]
    if not dims:
        lead = g.shape[: g.dim() - y.dim()]
        return g.reshape(*lead, -1).roll(-shifts[0], -1).reshape(g.shape)
    return g.roll([-s for s in shifts], [d if d < 0 else d - x.dim() for d in dims])


@adjoint(aten.cat.default, aten.concatenate.default)
def concatenated(g: Tensor, i: tuple[int, ...], y: Tensor, parts: list[Tensor], dim: int = 0) -> Tensor:
    dim = dim if dim < 0 else dim - y.dim()
    start = sum(p.shape[dim] for p in parts[: i[1]])
    return g.narrow(dim, start, parts[i[1]].shape[dim])


@adjoint(aten.stack.default)
def stacked(g: Tensor, i: tuple[int, ...], y: Tensor, parts: list[Tensor], dim: int = 0) -> Tensor:
    return g.select(dim if dim < 0 else dim - y.dim(), i[1])


@adjoint(aten.constant_pad_nd.default)
def padded(g: Tensor, i: int, y: Tensor, x: Tensor, pad: list[int], value: float = 0.0) -> Tensor:
    for d, (before, _) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        size = x.shape[-1 - d]
        g = g.narrow(-1 - d, before, size) if before >= 0 else torch.nn.functional.pad(g, pads_of(d, -before))
    return g


def pads_of(dim: int, before: int) -> list[int]:
    return [0, 0] * dim + [before, 0]


@adjoint(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def split(g: list[Tensor | None], i: int, y: list[Tensor], x: Tensor, sizes: Any, dim: int = 0) -> Tensor:
    """The parts side by side again, zeros where one is not used."""
    return torch.cat(_with_zeros(g, y), dim if dim < 0 else dim - x.dim())


@adjoint(aten.unbind.int)
def unbound(g: list[Tensor | None], i: int, y: list[Tensor], x: Tensor, dim: int = 0) -> Tensor:
    return torch.stack(_with_zeros(g, y), dim if dim < 0 else dim - x.dim())


def _with_zeros(parts: list[Tensor | None], like: list[Tensor]) -> list[Tensor]:
    known = next((g, y) for g, y in zip(parts, like, strict=True) if g is not None)
    lead = known[0].shape[: known[0].dim() - known[1].dim()]
    return [known[0].new_zeros(*lead, *y.shape) if g is None else g for g, y in zip(parts, like, strict=True)]


@adjoint(aten.embedding.default)
def embedded(g: Tensor, i: int, y: Tensor, w: Tensor, index: Tensor, *rest: Any) -> Tensor:
    lead = g.shape[: g.dim() - y.dim()]
    zeros = g.new_zeros(*lead, *w.shape)
    return zeros.index_add(len(lead), index.reshape(-1), g.reshape(*lead, -1, w.shape[1]))


@adjoint(aten.embedding.default, per_sample=True)
def embedded_per_sample(g: Tensor, i: int, y: Tensor, w: Tensor, index: Tensor, *rest: Any) -> Tensor:
    """What padding stops in training is as uncertain as any other row."""
    rows = g.reshape(*g.shape[:2], -1, w.shape[1])  # [K, B, T, D]
    where = index.reshape(1, index.shape[0], -1, 1).expand_as(rows)
    return g.new_zeros(*g.shape[:2], *w.shape).scatter_add(2, where, rows)


@adjoint(aten.index.Tensor)
def indexed(g: Tensor, i: Any, y: Tensor, x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Leading dimensions go behind all others, where indexing leaves them alone."""
    lead = g.shape[: g.dim() - y.dim()]
    rows = g.reshape(-1, *y.shape).movedim(0, -1)
    zeros = rows.new_zeros(*x.shape, rows.shape[-1])
    found = torch.ops.aten.index_put(zeros, indices, rows, True)
    return found.movedim(-1, 0).reshape(*lead, *x.shape)


@adjoint(aten.gather.default)
def gathered(g: Tensor, i: int, y: Tensor, x: Tensor, dim: int, index: Tensor, **named: Any) -> Tensor:
    lead = g.shape[: g.dim() - y.dim()]
    return g.new_zeros(*lead, *x.shape).scatter_add(dim if dim < 0 else dim - x.dim(), index.expand_as(g), g)
