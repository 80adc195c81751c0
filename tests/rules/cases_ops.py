"""Cases of the contract for the wider set of ops: writing, ordering, reductions, products, distances.

`OPS` go through the whole contract; `MORE` are other ops of the same families and only compared with the literal loop.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rules.cases import MASK, PAIR, ROW, Case, W, _matmul

INDEX = torch.tensor([[0, 2, 2, 1]])
MATRIX = ((2, 2),)
MATRICES = ((2, 2), (2, 2))
CUBE = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(2, 4, 4)
aten = torch.ops.aten


def at(x: Tensor) -> Tensor:
    """Places along the last dimension, the same for every sample."""
    return INDEX.expand(x.shape[0], 4)


def _outer(means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    """Covariance of `a_i b_j` beyond first order, literally."""
    a, b = covariances
    n, k = a.shape[-1], b.shape[-1]
    result = torch.zeros(a.shape[0], n * k, n * k, dtype=torch.float64)
    for i, j, p, q in itertools.product(range(n), range(k), range(n), range(k)):
        result[:, i * k + j, p * k + q] = a[:, i, p] * b[:, j, q]
    return result


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bi,bj->bij", x, y)


def _dot(means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    return (covariances[0] * covariances[1]).sum((1, 2)).reshape(-1, 1, 1)


MOVES = [
    Case("view_as", lambda x: x.view_as(torch.zeros(x.shape[0], 2, 2)), exact=True),
    Case("tensor_split", lambda x: x.tensor_split([1, 3], 1)[1], exact=True),
    Case("hstack", lambda x, y: torch.hstack([x, y]), ((2,), (3,)), exact=True),
    Case("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y)[1], ((2, 2), (1, 2)), exact=True),
]
MORE_MOVES = [
    Case("reshape_as", lambda x: x.reshape_as(torch.zeros(x.shape[0], 2, 2))),
    Case("broadcast_to", lambda x: x.unsqueeze(1).broadcast_to(x.shape[0], 2, 4)),
    Case("repeat_interleave of each", lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), 1, output_size=4)),
    Case("fliplr", torch.fliplr),
    Case("rot90", lambda x: x.rot90(1, (1, 2)), ((2, 3),)),
    Case("unfold a dimension", lambda x: x.unfold(1, 3, 1)),
    Case("take_along_dim", lambda x: x.take_along_dim(at(x), 1)),
    Case("diag_embed", lambda x: x.diag_embed(offset=1)),
    Case("linalg.diagonal", torch.linalg.diagonal, ((2, 3),)),
    Case("moveaxis", lambda x: x.moveaxis(1, 2), ((2, 3),)),
    Case("swapdims", lambda x: x.swapdims(1, 2), ((2, 3),)),
    Case("adjoint", lambda x: x.mH, ((2, 3),)),
    Case("atleast_3d", torch.atleast_3d),
    Case("unsafe_split", lambda x: x.unsafe_split(3, 1)[1]),
    Case("unsafe_chunk", lambda x: x.unsafe_chunk(2, 1)[1]),
    Case("dsplit", lambda x: x.dsplit(2)[1], MATRIX),
    Case("concatenate", lambda x, y: torch.concatenate([x, y], -1), ((2,), (3,))),
    Case("dstack", lambda x, y: torch.dstack([x, y]), PAIR),
    Case("column_stack", lambda x, y: torch.column_stack([x, y]), PAIR),
    Case("positive", lambda x: +x),
    Case("type_as", lambda x: x.type_as(ROW)),
]

WRITES = [
    Case("scatter", lambda x, y: x.scatter(1, INDEX[:, :2].expand(x.shape[0], 2), y), ((4,), (2,)), exact=True),
    Case("scatter_add", lambda x, y: x.scatter_add(1, at(x), y), PAIR, exact=True),
    Case("scatter_reduce mean", lambda x, y: x.scatter_reduce(1, at(x), y, "mean"), PAIR, exact=True),
    Case("scatter_reduce amax", lambda x, y: x.scatter_reduce(1, at(x), y, "amax"), PAIR),
    Case("index_add", lambda x, y: x.index_add(1, INDEX[0], y, alpha=-2.0), PAIR, exact=True),
    Case("index_put", lambda x, y: aten.index_put(x, [None, INDEX[0]], y, True), PAIR, exact=True),
    Case("masked_scatter", lambda x, y: _masked_scatter(x, y), ((4,), (2,)), exact=True, structures=("diagonal",)),
    Case("diagonal_scatter", lambda x, y: x.diagonal_scatter(y, dim1=1, dim2=2), ((2, 3), (2,)), exact=True),
]
MORE_WRITES = [
    Case("masked_fill with a number in a tensor", lambda x: x.masked_fill(MASK, torch.tensor(2.0))),
    Case("index_fill", lambda x: x.index_fill(1, INDEX[0], 2.0)),
    Case("index_copy", lambda x, y: x.index_copy(1, torch.tensor([2, 0]), y), ((4,), (2,))),
    Case("scatter a value", lambda x: x.scatter(1, at(x), 2.0)),
    Case("scatter to a constant", lambda x: torch.zeros_like(ROW).expand(x.shape[0], 4).scatter_add(1, at(x), x)),
    Case("scatter_reduce sum apart", lambda x, y: x.scatter_reduce(1, at(x), y, "sum", include_self=False), PAIR),
    Case("scatter_reduce mean apart", lambda x, y: x.scatter_reduce(1, at(x), y, "mean", include_self=False), PAIR),
    Case("scatter_reduce amin apart", lambda x, y: x.scatter_reduce(1, at(x), y, "amin", include_self=False), PAIR),
    Case("write to a mask", lambda x: _assign(x, MASK.expand(x.shape[0], 4))),
    Case("write to places", lambda x: _assign(x, (slice(None), torch.tensor([0, 2])))),
    Case("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 0, 4, 2), ((4,), (2,))),
    Case("select_scatter", lambda x, y: x.select_scatter(y, 1, 1), ((3, 2), (2,)), structures=("diagonal",)),
]


def _masked_scatter(x: Tensor, y: Tensor) -> Tensor:
    return x.masked_scatter(MASK.expand_as(x), y)


def _assign(x: Tensor, where: Tensor | tuple[slice | Tensor, ...]) -> Tensor:
    y = x * 2
    y[where] = 1.5
    return y


ORDER = [
    Case("sort", lambda x: x.sort(1, descending=True).values),
    Case("topk", lambda x: x.topk(2).values),
    Case("median", lambda x: x.median(1, keepdim=True).values),
    Case("cummax", lambda x: x.cummax(1).values),
    Case("aminmax", lambda x: x.aminmax(dim=1).min),
]
MORE_ORDER = [
    Case("stable sort", lambda x: torch.sort(x, stable=True, dim=1).values),
    Case("kthvalue", lambda x: x.kthvalue(2, 1).values),
    Case("nanmedian", lambda x: x.nanmedian(1).values),
    Case("mode", lambda x: x.mode(1).values),
    Case("cummin", lambda x: x.cummin(1).values),
    Case("max of two", torch.max, PAIR),
    Case("amax over all but the batch", lambda x: x.amax((1, 2)), ((2, 3),)),
]

REDUCTIONS = [
    Case("norm", lambda x: x.norm(dim=1)),
    Case("norm of order 3", lambda x: torch.linalg.vector_norm(x, 3, (1, 2), True), ((2, 2),)),
    Case("std", lambda x: x.std(1)),
    Case("var_mean", lambda x: torch.cat(torch.var_mean(x, (1, 2), correction=0, keepdim=True), 1), ((2, 2),)),
    Case("prod", lambda x: x.prod(1)),
    Case("cumprod", lambda x: x.cumprod(1), ((3, 2),)),
    Case("logcumsumexp", lambda x: x.logcumsumexp(1), ((3, 2),)),
    Case("diff", lambda x: x.diff(2, 1, prepend=ROW[None, :1].expand(x.shape[0], 1)), exact=True),
    Case("trapezoid", lambda x: torch.trapezoid(x, dx=0.7, dim=1), ((3, 2),), exact=True),
    Case("trapezoid at points", lambda x: torch.trapezoid(x, ROW[:3], dim=1), ((3, 2),), exact=True),
    Case("normalize", lambda x: F.normalize(x), structures=("full",)),
]
MORE_REDUCTIONS = [
    Case("norm of order 1", lambda x: x.norm(1, 1)),
    Case("norm of order 0.5", lambda x: x.norm(0.5, 1, True)),
    Case("largest entry", lambda x: x.norm(float("inf"), 1)),
    Case("linalg.norm", lambda x: torch.linalg.norm(x, dim=-1)),
    Case("Frobenius norm", torch.linalg.matrix_norm, ((2, 2),)),
    Case("aten norm", lambda x: aten.norm.ScalarOpt_dim(x, 2, [1], True)),
    Case("variance without correction", lambda x: x.var(1, unbiased=False)),
    Case("std with correction", lambda x: torch.std(x, (1, 2), correction=2), ((2, 2),)),
    Case("std_mean", lambda x: torch.std_mean(x, 1)[0]),
    Case("trapezoid at points for each row", lambda x: torch.trapezoid(x, W[:2, :3], dim=-1), ((2, 3),), exact=True),
    Case("trapz of one point", lambda x: torch.trapz(x), ((2, 1),), exact=True),
    Case("trapezoid at random points", lambda x, y: torch.trapezoid(x, y, dim=1), PAIR),
    Case("mean in a type", lambda x: x.mean(-1, dtype=torch.float64)),
]

PRODUCTS = [
    Case(
        "baddbmm",
        lambda x, y: torch.baddbmm(W[None, :2, :2], x, y, alpha=-0.5),
        MATRICES,
        exact=True,
        second_order=lambda m, c: 0.25 * _matmul(m, c),
    ),
    Case("einsum of two", _pairs, ((2,), (3,)), exact=True, second_order=_outer, structures=("diagonal",)),
    Case("inner", lambda x: torch.inner(x, ROW), ((2, 4),), exact=True),
    Case("tensordot", lambda x: torch.tensordot(x, W, ([2], [0])), ((2, 4),), exact=True),
    Case("vecdot", torch.linalg.vecdot, PAIR, exact=True, second_order=_dot),
    Case("cross", lambda x: torch.linalg.cross(x, ROW[None, :3]), ((3,),), exact=True),
    Case("bilinear form", lambda x: F.bilinear(x, ROW.expand(x.shape[0], 4), CUBE, ROW[:2]), exact=True),
]
MORE_PRODUCTS = [
    Case("einsum of two sums", lambda x: torch.einsum("bi,ij,jk->b", x, W, W.t()), exact=True),
    Case("kron", lambda x: torch.kron(x, W[None, :2, 0]), ((3,),), exact=True),
    Case("mv", lambda x: x.mv(ROW)),
    Case("multi_dot", lambda x: torch.linalg.multi_dot([x, W, W.t()])),
    Case("chain_matmul", lambda x: torch.chain_matmul(x, W, W.t(), W)),
    Case("einsum with dots", lambda x: torch.einsum("...d,dk->...k", x, W), ((2, 4),)),
    Case("einsum without an arrow", lambda x: torch.einsum("bd,dk", x, W)),
    Case("einsum of a diagonal", lambda x: torch.einsum("bii->bi", x), MATRIX),
    Case("addmv", lambda x: torch.addmv(x[:, 0], x * 0, ROW, beta=3), structures=("full",)),
    Case("addcmul", lambda x: torch.addcmul(x, ROW, ROW, value=2)),
    Case("addcdiv", lambda x, y: torch.addcdiv(x, ROW, y, value=2), PAIR),
    Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), PAIR),
    Case("lerp by a tensor", lambda x, y: torch.lerp(x, y, ROW), PAIR),
    Case("multiply", lambda x: x.multiply(ROW)),
    Case("divide", lambda x: x.divide(2.0)),
    Case("subtract", lambda x, y: x.subtract(y, alpha=2), PAIR),
    Case("true_divide", lambda x: x.true_divide(ROW)),
    Case("negative", lambda x: x.negative()),
    Case("clip", lambda x: x.clip(-1, 1)),
    Case("hypot", torch.hypot, PAIR),
    Case("logaddexp", torch.logaddexp, PAIR),
    Case("xlogy", torch.xlogy, PAIR, positive=True),
    Case("fmax", torch.fmax, PAIR),
    Case("remainder", lambda x: x.remainder(0.7)),
    Case("fmod", lambda x: x.fmod(0.7)),
    Case("round", torch.round),
    Case("nan_to_num", torch.nan_to_num),
]

SHUFFLED = torch.randperm(16, generator=torch.Generator().manual_seed(0))
GRID = torch.linspace(-1.4, 1.3, 16, dtype=torch.float64)[SHUFFLED].reshape(1, 4, 2, 2)
CUBES = torch.linspace(-1.1, 1.2, 12, dtype=torch.float64).reshape(1, 2, 1, 2, 3)


def _sample(x: Tensor, grid: Tensor = GRID, **settings: Any) -> Tensor:
    """A map at given places, some of them outside."""
    return F.grid_sample(x, grid.expand(x.shape[0], *grid.shape[1:]), **settings)


DISTANCES = [
    Case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), PAIR),
    Case("pairwise_distance", lambda x, y: F.pairwise_distance(x, y), PAIR),
    Case("cdist", lambda x, y: torch.cdist(x, y), ((2, 3), (1, 3))),
    Case("grid_sample", lambda x: _sample(x, align_corners=False), ((1, 2, 3),), exact=True),
    Case("affine_grid", lambda x: F.affine_grid(x, [x.shape[0], 1, 2, 1], False), ((2, 3),), exact=True),
]
REFLECTED = {"padding_mode": "reflection"}
MORE_DISTANCES = [
    Case("grid_sample to the border", lambda x: _sample(x, padding_mode="border", align_corners=True), ((2, 3, 2),)),
    Case("grid_sample reflected", lambda x: _sample(x, align_corners=False, **REFLECTED), ((1, 2, 3),)),
    Case("grid_sample reflected at corners", lambda x: _sample(x, align_corners=True, **REFLECTED), ((1, 2, 3),)),
    Case("grid_sample nearest", lambda x: _sample(x, mode="nearest", align_corners=False), ((1, 2, 3),)),
    Case("grid_sample of cubes", lambda x: _sample(x, CUBES, align_corners=False), ((1, 2, 1, 2),)),
    Case("cdist of order 1", lambda x: torch.cdist(x, W[None].mT[:, :2], 1.0), ((2, 4),)),
    Case("pairwise_distance of order 3", lambda x, y: F.pairwise_distance(x, y, 3.0, keepdim=True), PAIR),
]

OPS = [*MOVES, *WRITES, *ORDER, *REDUCTIONS, *PRODUCTS, *DISTANCES]
MORE = [*MORE_MOVES, *MORE_WRITES, *MORE_ORDER, *MORE_REDUCTIONS, *MORE_PRODUCTS, *MORE_DISTANCES]
