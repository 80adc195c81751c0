"""Ops that multiply and sum: inner and outer products, contractions, and products added to something.

All of them are Einstein sums (`products.product`): exact first two moments for independent factors and terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.elementwise.arithmetic import divide, multiply, stretched
from propagauss.rules.entries.shape import _named
from propagauss.rules.facts import state
from propagauss.rules.matrices.linear import matmul
from propagauss.rules.matrices.products import Letters, Value, product, reshaped, sum_of
from propagauss.rules.registry import rule

aten = torch.ops.aten
NOTE = "factors taken as independent: exact moments"


@rule(aten.dot.default, aten.vdot.default, aten.mv.default, aten.inner.default, note=NOTE)
def inner(x: Value, y: Value) -> Gaussian:
    """Over the last dimension of both; for `mv` and `dot` that is all there is."""
    a, b = mean_of(x), mean_of(y)
    mean = torch.mv(a, b) if (a.dim(), b.dim()) == (2, 1) else torch.inner(a, b)
    if not a.dim() or not b.dim():
        return multiply(stretched(x, mean.shape), stretched(y, mean.shape)).with_mean(mean)
    left, right = list(range(2, a.dim() + 1)), list(range(a.dim() + 1, a.dim() + b.dim()))
    return product([x, y], [[*left, 1], [*right, 1]], [*left, *right], mean)


state(aten.dot.default, aten.mv.default, linear_in=(0, 1))


@rule(aten.linalg_vecdot.default, note=NOTE)
def vecdot(x: Value, y: Value, *, dim: int = -1) -> Gaussian:
    mean = torch.linalg.vecdot(mean_of(x), mean_of(y), dim=dim)
    shape = torch.broadcast_shapes(mean_of(x).shape, mean_of(y).shape)
    return multiply(stretched(x, shape), stretched(y, shape)).mapped(mean, lambda t: t.sum(dim))


@rule(aten.outer.default, aten.ger.default, note=NOTE)
def outer(x: Value, y: Value) -> Gaussian:
    return product([x, y], [[1], [2]], [1, 2], torch.outer(mean_of(x), mean_of(y)))


@rule(aten.tensordot.default, note=NOTE)
def tensordot(x: Value, y: Value, dims_self: list[int], dims_other: list[int]) -> Gaussian:
    a, b = mean_of(x), mean_of(y)
    left, right = list(range(a.dim())), list(range(a.dim(), a.dim() + b.dim()))
    for i, j in zip(dims_self, dims_other, strict=True):
        right[j] = left[i]
    summed = {left[i] for i in dims_self}
    result = [c for c in (*left, *right) if c not in summed]
    return product([x, y], [left, right], result, aten.tensordot(a, b, dims_self, dims_other))


@rule(aten.kron.default, note=NOTE)
def kron(x: Value, y: Value) -> Gaussian:
    mean = torch.kron(mean_of(x), mean_of(y))
    dims = mean.dim()
    left, right = list(range(dims)), list(range(dims, 2 * dims))
    pairs = [c for pair in zip(left, right, strict=True) for c in pair]
    apart = torch.empty((*_lifted(x, dims).shape, *_lifted(y, dims).shape), device="meta").permute(pairs).shape
    both = product([_lifted(x, dims), _lifted(y, dims)], [left, right], pairs, mean.reshape(apart))
    return reshaped(both, mean.shape)  # type: ignore[return-value]


@rule(aten.bilinear.default, note=NOTE, linear_in=(0, 1, 2), adds=3, reads_weight=True)
def bilinear(input1: Value, input2: Value, weight: Value, bias: Value | None = None) -> Gaussian:
    """`y_o = Σ_ij x_i W_oij z_j + b_o`"""
    values = [mean_of(x) for x in (input1, input2, weight)]
    mean = aten.bilinear(*values, None if bias is None else mean_of(bias))
    dots = list(range(10, 9 + values[0].dim()))
    names = [[*dots, 1], [*dots, 2], [0, 1, 2]]
    terms: list[Gaussian] = []
    if any(isinstance(x, Gaussian) for x in (input1, input2, weight)):
        terms.append(product([input1, input2, weight], names, [*dots, 0], mean))
    if isinstance(bias, Gaussian):
        terms.append(bias)
    return sum_of(mean, terms)


@rule(aten.linalg_multi_dot.default, aten.chain_matmul.default, note=NOTE)
def multi_dot(tensors: Sequence[Value]) -> Gaussian:
    values = [mean_of(x) for x in tensors]
    mean = torch.linalg.multi_dot(values)
    names = [[i, i + 1] for i in range(len(values))]
    if values[0].dim() == 1:
        names[0] = [1]
    if values[-1].dim() == 1:
        names[-1] = [len(values) - 1]
    result = ([0] if values[0].dim() == 2 else []) + ([len(values)] if values[-1].dim() == 2 else [])
    return product(tensors, names, result, mean)


@rule(aten.linalg_cross.default, aten.cross.default, note=NOTE)
def cross(x: Value, y: Value, dim: int | None = -1) -> Gaussian:
    """`y_k = Σ_ij ε_kij a_i b_j`: two terms each, so the product of a third, certain operand."""
    a, b = torch.broadcast_tensors(mean_of(x), mean_of(y))
    along = a.dim() - 1 if dim == -1 else next(d for d, s in enumerate(a.shape) if s == 3) if dim is None else dim
    mean = torch.linalg.cross(a, b, dim=along)
    sign = a.new_zeros(3, 3, 3)
    for k in range(3):
        i, j = (k + 1) % 3, (k + 2) % 3
        sign[k, i, j], sign[k, j, i] = 1, -1
    along = along % a.dim()

    def letters(own: int) -> Letters:
        return [own if d == along else d for d in range(a.dim())]

    names = [letters(-1), letters(-2), [-3, -1, -2]]
    return product([_lifted(x, a.dim()), _lifted(y, a.dim()), sign], names, letters(-3), mean)


def _lifted(x: Value, dims: int) -> Value:
    lead = dims - len(x.shape)
    return x if lead == 0 else reshaped(x, (*[1] * lead, *x.shape))


# -- a product added to something


def _accumulated(base: Any, both: Gaussian | Tensor, mean: Tensor, beta: float, alpha: float) -> Gaussian:
    """`β base + α product` for independent parts."""
    parts: list[Any] = []
    if isinstance(both, Gaussian):
        parts.append(both if alpha == 1 else multiply(both, alpha))
    if isinstance(base, Gaussian) and beta != 0:
        parts.append(base if beta == 1 else multiply(base, beta))
    if not parts:  # β = 0 leaves the base out altogether
        parts.append(base.scaled(base.mean, torch.zeros_like(base.mean)))
    return sum_of(mean, parts)


def _adds(op: Any, letters: list[Letters], result: Letters) -> Any:
    def accumulate(base: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Gaussian:
        values = [mean_of(v) for v in (base, x, y)]
        mean = op(*values, beta=beta, alpha=alpha)
        both: Any = None
        if isinstance(x, Gaussian) or isinstance(y, Gaussian):
            both = product([x, y], letters, result, torch.zeros_like(mean))
        return _accumulated(base, both, mean, beta, alpha)

    return _named(accumulate, op)


for _op, _names, _result in (
    (aten.baddbmm.default, [[0, 1, 2], [0, 2, 3]], [0, 1, 3]),
    (aten.addbmm.default, [[0, 1, 2], [0, 2, 3]], [1, 3]),
    (aten.addmv.default, [[1, 2], [2]], [1]),
    (aten.addr.default, [[1], [2]], [1, 2]),
):
    rule(_op, note=NOTE)(_adds(_op, _names, _result))


@rule(aten.addmm.default, note=NOTE)
def addmm(base: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Gaussian:
    mean = torch.addmm(*(mean_of(v) for v in (base, x, y)), beta=beta, alpha=alpha)
    both: Any = matmul(x, y) if isinstance(x, Gaussian) or isinstance(y, Gaussian) else None
    return _accumulated(base, both, mean, beta, alpha)


def _of_both(rule: Any, x: Any, y: Any, mean: Tensor) -> Any:
    if isinstance(x, Gaussian) or isinstance(y, Gaussian):
        return rule(stretched(x, mean.shape), stretched(y, mean.shape))
    return None


@rule(aten.addcmul.default, note="independent terms and factors: exact moments")
def addcmul(base: Any, x: Any, y: Any, *, value: float = 1) -> Gaussian:
    mean = torch.addcmul(*(mean_of(v) for v in (base, x, y)), value=value)
    both = _of_both(multiply, x, y, mean)
    return _accumulated(base, both, mean, 1, value)


@rule(aten.addcdiv.default, note="independent terms; linearised in the divisor")
def addcdiv(base: Any, x: Any, y: Any, *, value: float = 1) -> Gaussian:
    mean = torch.addcdiv(*(mean_of(v) for v in (base, x, y)), value=value)
    both = _of_both(divide, x, y, mean)
    return _accumulated(base, both, mean, 1, value)
