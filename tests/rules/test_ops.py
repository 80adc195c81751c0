"""Every rule of the wider set with each subset of its arguments uncertain, without samples, against `J C Jᵀ`."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import propagauss as pg
from propagauss.rules import scatter
from propagauss.rules.facts import facts
from propagauss.rules.registry import FUNCTIONS
from reference import random_psd
from rules.cases import Case
from rules.cases_ops import MORE
from rules.test_contract import test_equals_the_literal_loop as equals_the_literal_loop

aten = torch.ops.aten
SMALL = 1e-10  # so that only the first order is left


@pytest.mark.parametrize(
    "case, structure", [pytest.param(c, s, id=f"{c.name}-{s}") for c in MORE for s in c.structures]
)
def test_other_ops_equal_the_literal_loop(case: Case, structure: str) -> None:
    equals_the_literal_loop(case, structure)


def numbers(*shape: int) -> Tensor:
    """Different numbers, none of them near zero."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x + 0.3 * x.sign()


V, M, C, S = numbers(3), numbers(2, 3), numbers(2, 2, 3), numbers()
INDEX = torch.tensor([[0, 1, 1], [1, 0, 0]])
PICK = torch.tensor([2, 0, 2])
MASK = torch.tensor([True, False, True])

CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.expand_as.default, (V,), {"other": torch.ones(2, 3)}),
    (aten.sum.default, (S,), {"dtype": torch.float64}),
    (aten.sum.dim_IntList, (C, None, True), {}),
    (aten.mean.default, (C,), {}),
    (aten.mean.dim, (C, [0, 2], True), {"dtype": torch.float64}),
    (aten.trace.default, (M,), {}),
    (aten.take.default, (M, PICK), {}),
    (aten.diag.default, (V, 1), {}),
    (aten.diagflat.default, (V,), {}),
    (aten.flipud.default, (M,), {}),
    (aten.block_diag.default, ([V, M],), {}),
    (aten.column_stack.default, ([V, 2 * V],), {}),
    (aten.vstack.default, ([V, 2 * V],), {}),
    (aten.meshgrid.indexing, ([V, 2 * V],), {"indexing": "xy"}),
    (aten.masked_fill.Scalar, (M, MASK, 2.0), {}),
    (aten.masked_fill.Tensor, (M, MASK), {"value": S}),
    (aten.index_fill.int_Tensor, (M, 1, PICK[:2], S), {}),
    (aten.index_copy.default, (M, 1, PICK[:2], M[:, :2]), {}),
    (aten.index_add.default, (M, 0, torch.tensor([1, 1]), M), {"alpha": 3.0}),
    (aten.scatter.value, (M, 1, INDEX, 2.0), {}),
    (aten.scatter.src, (M, 1, torch.tensor([[1], [2]]), M[:, :1]), {}),
    (aten.scatter_add.default, (M, 0, INDEX), {"src": M}),
    (aten.slice_scatter.default, (M, V[None], 0, 1), {}),
    (aten.select_scatter.default, (M, V, 0, -1), {}),
    (aten.diagonal_scatter.default, (M, V[:2]), {}),
    (aten.sort.default, (S,), {}),
    (aten.topk.default, (M, 2), {"dim": 1, "largest": False}),
    (aten.msort.default, (M,), {}),
    (aten.max.default, (M,), {}),
    (aten.min.default, (S,), {}),
    (aten.median.default, (M,), {}),
    (aten.nanmedian.default, (M,), {}),
    (aten.amax.default, (C,), {}),
    (aten.amin.default, (S,), {}),
    (aten.aminmax.default, (M,), {"dim": 0, "keepdim": True}),
    (aten.linalg_vector_norm.default, (C,), {}),
    (aten.linalg_vector_norm.default, (S,), {}),
    (aten.linalg_vector_norm.default, (C, float("inf"), [0, 1]), {"keepdim": True}),
    (aten.linalg_vector_norm.default, (C, -2.0, [0, 1]), {}),
    (aten.norm.Scalar, (M, 3), {}),
    (aten.norm.ScalarOpt_dim_dtype, (M, 1, [0], True), {"dtype": torch.float64}),
    (aten.var.default, (M,), {}),
    (aten.std.default, (M, False), {}),
    (aten.var_mean.correction, (C, [0, 1]), {"correction": 2, "keepdim": True}),
    (aten.std_mean.dim, (C, [1], False), {}),
    (aten.prod.default, (M,), {}),
    (aten.prod.default, (S,), {}),
    (aten.prod.dim_int, (torch.tensor([[2.0, 0.0, 3.0]]).double(), 1), {}),
    (aten.cumprod.default, (torch.tensor([[2.0, 0.0, 3.0]]).double(), 1), {}),
    (aten.logcumsumexp.default, (M, 0), {}),
    (aten.trapezoid.dx, (M,), {"dx": 0.3, "dim": 0}),
    (aten.diff.default, (M, 1, 1, None), {"append": M[:, :1]}),
    (aten.einsum.default, ("ij,kj->ik", [M, 2 * M]), {}),
    (aten.einsum.default, ("ij,jk,lk->i", [M, numbers(3, 2), 2 * M[:, :2]]), {}),
    (aten.einsum.default, ("...i,ji->...", [C, V[None]]), {}),
    (aten.matmul.default, (C, numbers(3, 2)), {}),
    (aten.matmul.default, (V, C.mT), {}),
    (aten.mm.default, (M, M.t()), {}),
    (aten.dot.default, (V, 2 * V), {}),
    (aten.vdot.default, (V, 2 * V), {}),
    (aten.mv.default, (M, V), {}),
    (aten.inner.default, (C, M), {}),
    (aten.inner.default, (M, S), {}),
    (aten.linalg_vecdot.default, (C, M), {"dim": -1}),
    (aten.outer.default, (V, 2 * V), {}),
    (aten.tensordot.default, (C, M, [1, 2], [0, 1]), {}),
    (aten.kron.default, (M, V), {}),
    (aten.bilinear.default, (M, 2 * M, numbers(4, 3, 3), numbers(4)), {}),
    (aten.linalg_multi_dot.default, ([V, numbers(3, 2), M, V],), {}),
    (aten.linalg_cross.default, (C, M[None]), {}),
    (aten.cross.default, (M, 2 * M), {}),
    (aten.addmm.default, (V[:2], M, M.t()), {"beta": 3, "alpha": 0.5}),
    (aten.baddbmm.default, (S, C, C.mT), {"beta": 3, "alpha": 0.5}),
    (aten.addbmm.default, (V[:2], C, C.mT), {}),
    (aten.addmv.default, (V[:2], M, V), {"beta": 0}),
    (aten.addr.default, (M, V[:2], V), {"beta": 2}),
    (aten.addcmul.default, (S, M, V), {"value": 2}),
    (aten.addcdiv.default, (S, M, V), {"value": 2}),
    (aten.linear.default, (C, numbers(4, 3), numbers(4)), {}),
    (aten.cosine_similarity.default, (C, M), {"dim": -1}),
    (aten.pairwise_distance.default, (C, M), {}),
    (aten.cdist.default, (C, numbers(4, 3), 3.0), {}),
    (aten._weight_norm.default, (C, numbers(2, 1, 1)), {}),
    (aten._weight_norm.default, (C, numbers(1, 1, 3), 2), {}),
    (aten.multiply.Tensor, (M, 2 * M), {}),
    (aten.divide.Tensor, (M, 2 * M), {}),
    (aten.subtract.Tensor, (M, 2 * M), {"alpha": 2}),
]
BUILT: list[tuple[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]]] = [
    (scatter.index_put, aten.index_put.default, (M, [None, PICK], M, True), {}),
    (scatter.index_put, aten.index_put.default, (M, [torch.tensor([True, False])], S), {}),
    (scatter.scatter_sum, aten.scatter_reduce.two, (M, 0, INDEX, M, "sum"), {"include_self": False}),
    (scatter.scatter_mean, aten.scatter_reduce.two, (M, 0, INDEX, M, "mean"), {}),
    (
        scatter.scatter_extreme,
        aten.scatter_reduce.two,
        (M, 1, INDEX[:, :2], 2 * M[:, :2], "amin"),
        {"include_self": False},
    ),
    (scatter.scatter_extreme, aten.scatter_reduce.two, (M, 1, INDEX[:, :2], 2 * M[:, :2], "amax"), {}),
    (scatter.masked_scatter, aten.masked_scatter.default, (M, MASK, numbers(5)), {}),
]
ALL = [(FUNCTIONS[op].function, op, args, kwargs) for op, args, kwargs in CALLS] + BUILT


def is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("rule, op, args, kwargs", ALL, ids=[f"{op}-{i}" for i, (_, op, *_) in enumerate(ALL)])
def test_any_subset_of_the_arguments(
    rule: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], structure: str
) -> None:
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    names = [i for i, leaf in enumerate(leaves) if is_real(leaf)]
    ignored = {id(args[i]) for i in facts(op).at_mean if i < len(args)} | {id(kwargs.get("other"))}
    names = [i for i in names if id(leaves[i]) not in ignored]
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            _compare(rule, op, leaves, spec, chosen, structure)


def _compare(rule: Any, op: Any, leaves: list[Any], spec: Any, chosen: tuple[int, ...], structure: str) -> None:
    covariances = {
        i: random_psd(leaves[i].numel(), scale=SMALL, generator=torch.Generator().manual_seed(i)) for i in chosen
    }
    given = list(leaves)
    for i, c in covariances.items():
        if structure == "full":
            given[i] = pg.Gaussian.full(leaves[i], c.unsqueeze(0))
        else:
            covariances[i] = torch.diag(c.diagonal())
            given[i] = pg.Gaussian.diagonal(leaves[i], c.diagonal().reshape(leaves[i].shape))
    args, kwargs = torch.utils._pytree.tree_unflatten(given, spec)
    found = rule(*args, **kwargs)

    def function(*values: Tensor) -> list[Tensor]:
        plain = list(leaves)
        for i, value in zip(chosen, values, strict=True):
            plain[i] = value
        args, kwargs = torch.utils._pytree.tree_unflatten(plain, spec)
        return results(op(*args, **kwargs))

    values = tuple(leaves[i] for i in chosen)
    means = function(*values)
    for k, (g, mean) in enumerate(zip(results(found), means, strict=True)):
        jacobians = torch.autograd.functional.jacobian(lambda *v, k=k: function(*v)[k], values)
        truth = torch.zeros(mean.numel(), mean.numel(), dtype=torch.float64)
        for i, j in zip(chosen, jacobians, strict=True):
            flat = j.reshape(mean.numel(), -1)
            truth += flat @ covariances[i] @ flat.mT
        torch.testing.assert_close(pg.gaussian.mean_of(g), mean, rtol=0, atol=1e-15)
        if not isinstance(g, pg.Gaussian):
            assert not truth.any()
        elif structure == "full":
            torch.testing.assert_close(g.covariance, truth.unsqueeze(0), rtol=1e-6, atol=1e-6 * SMALL)
        else:
            torch.testing.assert_close(g.variance.flatten(), truth.diagonal(), rtol=1e-6, atol=1e-6 * SMALL)


def results(value: Any) -> list[Any]:
    """The results with real numbers, of those that an op may return."""
    each = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in each if is_real(pg.gaussian.mean_of(v))]
