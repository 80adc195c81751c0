"""Reductions that are not linear: norms, variances, products; and integrals and differences along a dimension.

Each result `y = f(x_1, ..., x_n)` is linearised at the mean: `var = Σ_i (∂f/∂x_i)² v_i`, and `J C Jᵀ` in the full
structure. Exact to first order. It is bad where the gradient vanishes or jumps within a standard deviation of the mean:
the norm of a vector whose mean is zero, the variance of equal numbers, a product with several zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.entries.joining import concatenated
from propagauss.rules.entries.shape import _named
from propagauss.rules.registry import Built, Signature, Site, builder, named, rule

aten = torch.ops.aten
NOTE = "linearised through its gradient"


def reduced(x: Gaussian, mean: Tensor, slope: Tensor, dims: list[int], keepdim: bool = False) -> Gaussian:
    """`y = Σ_i g_i x_i` over `dims` to first order, with `slope` (shape of x) the gradient `g`."""

    def total(t: Tensor) -> Tensor:
        return t.sum(dims, keepdim) if dims else t

    return x.mapped(mean, lambda t: total(slope * t), lambda v: total(slope.square() * v))


def _dims(x: Gaussian, dim: Any) -> list[int]:
    """The dimensions as a list; all of them where the op says None or nothing."""
    if isinstance(dim, int):
        return [dim] if x.mean.dim() else []
    return list(dim) if dim and x.mean.dim() else list(range(x.mean.dim()))


# -- norms


def norm_slope(m: Tensor, norm: Tensor, order: float, dims: list[int]) -> Tensor:
    """`∂‖x‖_p / ∂x_i = sign(x_i) (|x_i| / ‖x‖_p)^(p - 1)`, zero where `x_i` is; `norm` keeps its dimensions."""
    if order == 0:
        return torch.zeros_like(m)
    if order == 1:
        return m.sign()
    size = m.abs()
    if math.isinf(order):
        reached = (size == norm).to(m.dtype)
        return m.sign() * (reached / reached.sum(dims, True) if dims else reached)
    ratio = m / torch.where(norm == 0, 1.0, norm)
    if order == 2:
        return ratio
    filled = torch.where(m == 0, 1.0, ratio.abs())
    return m.sign() * filled ** (order - 1)


def vector_norm(
    x: Gaussian, order: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Gaussian:
    """`‖x‖_p` along some dimensions."""
    order = 2 if order is None else order
    x = x if dtype is None else x.to(dtype=dtype)
    dims = _dims(x, dim)
    kept = torch.linalg.vector_norm(x.mean, order, dims or None, True)
    mean = torch.linalg.vector_norm(x.mean, order, dims or None, keepdim)
    return reduced(x, mean, norm_slope(x.mean, kept, order, dims), dims, keepdim)


rule(aten.linalg_vector_norm.default, note=NOTE)(vector_norm)
for _op in (aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype):
    rule(_op, note=NOTE)(vector_norm)


@builder(
    aten.linalg_norm.default,
    aten.linalg_norm.ord_str,
    aten.linalg_matrix_norm.default,
    aten.linalg_matrix_norm.str_ord,
)
def build_matrix_norm(site: Site) -> Built | None:
    """Norms of vectors, and the Frobenius norm of matrices; the others are left to the general rule."""
    given = named(site)
    order, dim = given["ord"], given["dim"]
    width = len(site.shape(given["self"])) if dim is None else 1 if isinstance(dim, int) else len(dim)
    if order == "fro" or order is None:
        order = 2
    elif width != 1:
        return None
    return Built(plain_norm, (given["self"], order, dim, given["keepdim"], given["dtype"]), NOTE)


def plain_norm(x: Gaussian, order: float, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Gaussian:
    return vector_norm(x, order, dim, keepdim, dtype=dtype)


# -- variances


def _moment(op: Any) -> Callable[..., Any]:
    """`∂s²/∂x_i = 2 (x_i - x̄) / (n - c)`, `∂s/∂x_i = (x_i - x̄) / ((n - c) s)`, `c` the correction."""
    name, signature = op._schema.name.removeprefix("aten::"), Signature(op)

    def moment(x: Gaussian, *args: Any, **kwargs: Any) -> Any:
        given = signature.named((x, *args), kwargs)
        dims, keepdim = _dims(x, given.get("dim")), given.get("keepdim", False)
        correction = given.get("correction", 1 if given.get("unbiased", True) else 0)
        count = torch.Size(x.shape[d] for d in dims).numel()
        result = op(x.mean, *args, **kwargs)
        centre = x.mean.mean(dims, True) if dims else x.mean
        slope = (x.mean - centre) / (count - (1 if correction is None else correction))
        if name.startswith("std"):
            deviation = torch.std(x.mean, dims, correction=correction, keepdim=True) if dims else result
            slope = slope / torch.where(deviation == 0, 1.0, deviation)
        else:
            slope = 2 * slope
        if not name.endswith("mean"):
            return reduced(x, result, slope, dims, keepdim)
        share = torch.full_like(x.mean, 1 / count)
        return reduced(x, result[0], slope, dims, keepdim), reduced(x, result[1], share, dims, keepdim)

    return _named(moment, op)


for _packet in (aten.var, aten.std, aten.var_mean, aten.std_mean):
    for _op in (_packet.default, _packet.dim, _packet.correction):
        rule(_op, note=NOTE)(_moment(_op))


# -- products and sums along the way


@rule(aten.prod.default, aten.prod.dim_int, note=NOTE)
def prod(x: Gaussian, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Gaussian:
    """`∂/∂x_i Π_j x_j`, the product of the others: of those before and of those after, so that zeros do no harm."""
    x = x if dtype is None else x.to(dtype=dtype)
    if dim is None:
        return prod(x.reshaped((-1,)), 0).with_mean(x.mean.prod())
    if not x.mean.dim():
        return x
    one = torch.ones_like(x.mean.narrow(dim, 0, 1))
    size = x.shape[dim]
    before = torch.cat([one, x.mean.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.mean.flip(dim).narrow(dim, 0, size - 1)], dim).cumprod(dim).flip(dim)
    return reduced(x, x.mean.prod(dim, keepdim), before * after, [dim], keepdim)


def _along(x: Gaussian, mean: Tensor, matrix: Tensor, dim: int) -> Gaussian:
    """`y_k = Σ_i J_ki x_i` along a dimension: `matrix` is `[..., k, i]`, with that dimension moved to the end."""

    def through(t: Tensor, coefficients: Tensor) -> Tensor:
        return (coefficients @ t.movedim(dim, -1).unsqueeze(-1)).squeeze(-1).movedim(-1, dim)

    return x.mapped(mean, lambda t: through(t, matrix), lambda v: through(v, matrix.square()))


@rule(aten.cumprod.default, note="linearised (diagonal: results along the dimension count as independent)")
def cumprod(x: Gaussian, dim: int, *, dtype: torch.dtype | None = None) -> Gaussian:
    """`∂y_k/∂x_i = Π_{j ≤ k, j ≠ i} x_j` for `i ≤ k`: the running product with `x_i` replaced by 1. n² numbers."""
    x = x if dtype is None else x.to(dtype=dtype)
    if not x.mean.dim():
        return x
    n = x.shape[dim]
    own = torch.eye(n, dtype=torch.bool, device=x.device)
    rows = torch.where(own, 1.0, x.mean.movedim(dim, -1).unsqueeze(-2)).cumprod(-1)  # [..., i, k]
    return _along(x, x.mean.cumprod(dim), rows.triu().mT, dim)


@rule(aten.logcumsumexp.default, note="linearised (diagonal: results along the dimension count as independent)")
def logcumsumexp(x: Gaussian, dim: int) -> Gaussian:
    """`∂y_k/∂x_i = exp(x_i - y_k)` for `i ≤ k`. n² numbers."""
    mean = torch.logcumsumexp(x.mean, dim)
    if not x.mean.dim():
        return x
    later = mean.movedim(dim, -1).unsqueeze(-1)
    # above the diagonal the difference may overflow, and infinity times zero is no number
    exponent = (x.mean.movedim(dim, -1).unsqueeze(-2) - later).clamp(max=0)
    return _along(x, mean, exponent.exp().tril(), dim)


@rule(aten.diff.default, note="exact (diagonal: differences count as independent)")
def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Gaussian:
    """`y_i = Σ_j (-1)^(n-j) (n over j) x_{i+j}`, so `var_i = Σ_j (n over j)² v_{i+j}`."""
    if prepend is not None or append is not None:
        ends = [part for part in (prepend, x, append) if part is not None]
        return diff(concatenated(ends, dim), n, dim)

    def squared(v: Tensor) -> Tensor:
        weights = v.new_tensor([math.comb(n, j) ** 2 for j in range(n + 1)])
        return v.unfold(dim, n + 1, 1) @ weights if v.shape[dim] > n else torch.diff(v, n, dim)

    return x.mapped(torch.diff(x.mean, n, dim), lambda t: torch.diff(t, n, dim), squared)


def integral(y: Gaussian, gaps: Tensor, mean: Tensor, dim: int) -> Gaussian:
    """`Σ_i w_i y_i`, `w_i` half of the gaps before and after point `i`; `gaps` has one entry less along `dim`."""
    end = torch.zeros_like(y.mean.narrow(dim, 0, 1))
    gaps = gaps.expand(y.mean.narrow(dim, 0, y.shape[dim] - 1).shape)
    return reduced(y, mean, (torch.cat([gaps, end], dim) + torch.cat([end, gaps], dim)) / 2, [dim])


@rule(aten.trapezoid.dx, note="exact", linear_in=(0,))
def trapezoid(y: Gaussian, *, dx: float = 1, dim: int = -1) -> Gaussian:
    """`dx (½ y_1 + y_2 + ... + y_{n-1} + ½ y_n)`"""
    return integral(y, y.mean.new_full((), dx), torch.trapezoid(y.mean, dx=dx, dim=dim), dim)


@builder(aten.trapezoid.x)
def build_trapezoid(site: Site) -> Built | None:
    """At points that are known; random ones are left to the general rule."""
    given = named(site)
    if site.is_random(given["x"]):
        return None
    return Built(trapezoid_at, (given["y"], given["x"], given["dim"]), "exact")


def trapezoid_at(y: Gaussian, points: Tensor, dim: int) -> Gaussian:
    """`Σ_i ½ (t_{i+1} - t_i) (y_i + y_{i+1})`, `points` `t [n]` or like `y`."""
    gaps = points.diff(dim=dim if points.dim() > 1 else 0)
    if points.dim() == 1:
        gaps = gaps.reshape(-1, *[1] * (-1 - dim if dim < 0 else y.mean.dim() - 1 - dim))
    return integral(y, gaps.to(y.dtype), torch.trapezoid(y.mean, points, dim=dim), dim)
