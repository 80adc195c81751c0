"""Sums, differences, products and quotients of Gaussians and constants; two Gaussians count as independent.

    x ± y:  m_x ± m_y,   C_x + C_y                       (exact for independent x, y)
    x · y:  m_x m_y,     m_y² C_x + m_x² C_y + C_x ∘ C_y  (exact first two moments for independent x, y)

A residual sum `x + f(x)` is not independent: its variance is wrong by `2 Cov(x, f(x))`. Where `f` is elementwise the
two branches are fused and nothing is lost; elsewhere the independence is the paper's assumption, and the plan says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, common, mean_of
from propagauss.rules.elementwise.moments import leaky_relu
from propagauss.rules.elementwise.moments import relu as positive_part
from propagauss.rules.elementwise.slopes import partial_slope
from propagauss.rules.facts import state
from propagauss.rules.registry import Built, Site, builder, rule

aten = torch.ops.aten
Value = Gaussian | Tensor | float


def independent_sum(mean: Tensor, parts: list[Gaussian]) -> Gaussian:
    """Covariances of independent parts add; every part already has the shape of `mean`."""
    kind = common(parts)
    return Gaussian.of(kind, mean, kind.plus(mean, parts))


def stretched(x: Any, shape: Sequence[Any]) -> Any:
    """Broadcast within each sample, or where there are no samples at all (`Gaussian.expanded` also makes samples)."""
    if not isinstance(x, Gaussian) or x.shape == torch.Size(shape):
        return x
    return x.mapped(x.mean.expand(shape), lambda t: t.expand(shape))


@rule(aten.add.Tensor, aten.add.Scalar, operator.add, note="independent terms", sums=True)
def add(x: Value, y: Value, *, alpha: float = 1) -> Gaussian:
    mean = mean_of(x) + mean_of(y) if alpha == 1 else torch.add(mean_of(x), mean_of(y), alpha=alpha)
    y = multiply(y, alpha) if isinstance(y, Gaussian) and alpha != 1 else y
    return independent_sum(mean, [g.expanded(mean.shape) for g in (x, y) if isinstance(g, Gaussian)])


@rule(aten.sub.Tensor, aten.sub.Scalar, operator.sub, note="independent terms", sums=True)
def subtract(x: Value, y: Value, *, alpha: float = 1) -> Gaussian:
    return add(x, y, alpha=-alpha)


@rule(aten.rsub.Tensor, aten.rsub.Scalar, note="independent terms", sums=True)
def reverse_subtract(x: Value, y: Value, alpha: float = 1) -> Gaussian:
    return add(multiply(x, -alpha), y)


@rule(aten.mul.Tensor, aten.mul.Scalar, operator.mul, note="independent factors: exact moments", linear_in=(0, 1))
def multiply(x: Value, y: Value) -> Gaussian:
    mean = mean_of(x) * mean_of(y)
    if not isinstance(y, Gaussian):
        assert isinstance(x, Gaussian)
        return x.expanded(mean.shape).scaled(mean, torch.as_tensor(y, dtype=mean.dtype, device=mean.device))
    if not isinstance(x, Gaussian):
        return multiply(y, x)
    kind = common((x, y))
    return Gaussian.of(kind, mean, kind.times(mean, x, y))


@rule(
    aten.div.Tensor,
    aten.div.Scalar,
    operator.truediv,
    note="independent terms; linearised in the divisor",
    linear_in=(0,),
)
def divide(x: Value, y: Value) -> Gaussian:
    if not isinstance(y, Gaussian):
        mean = mean_of(x) / y
        assert isinstance(x, Gaussian)
        divisor = torch.as_tensor(y, dtype=mean.dtype, device=mean.device)
        return x.expanded(mean.shape).scaled(mean, divisor.reciprocal())
    return delta(torch.div, x, y)


# an unbatched parameter meets samples here without further ado
state(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar, broadcasts=True)
state(aten.where.self, broadcasts=True)


@rule(aten.neg.default, operator.neg, sums=True, linear_in=(0,))
def negate(x: Gaussian) -> Gaussian:
    return x.scale(1.0).scaled(-x.mean, -torch.ones((), dtype=x.dtype, device=x.device))


def delta(function: Callable[..., Tensor], *args: Any) -> Gaussian:
    """Any elementwise function of several independent values: `C = Σ_i D_i C_i D_i`, `D_i = diag(∂g/∂x_i)`."""
    values = [mean_of(a) for a in args]
    mean = function(*values)
    parts = []
    for i, arg in enumerate(args):
        if isinstance(arg, Gaussian):
            wide = arg.expanded(mean.shape)
            slope = partial_slope(function, mean, tuple(values), i)
            parts.append(wide.scaled(mean, _forward_slope(function, values, i, wide.mean) if slope is None else slope))
    return independent_sum(mean, parts)


def _forward_slope(function: Callable[..., Tensor], values: list[Any], i: int, at: Tensor) -> Tensor:
    """By forward-mode differentiation, which refuses overlapping memory."""

    def partial(t: Tensor) -> Tensor:
        return function(*values[:i], t, *values[i + 1 :])

    at = at.contiguous()
    return torch.func.jvp(partial, (at,), (torch.ones_like(at),))[1]


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, note="independent branches", elementwise=True)
def where(condition: Tensor, x: Value, y: Value) -> Gaussian:
    mean = torch.where(condition, mean_of(x), mean_of(y))
    chosen = condition.to(mean.dtype)
    parts = []
    for value, weight in ((x, chosen), (y, 1 - chosen)):
        if isinstance(value, Gaussian):
            parts.append(value.expanded(mean.shape).scaled(mean, weight))
    return independent_sum(mean, parts)


@rule(aten.prelu.default, note="linearised", broadcasts=True)
def prelu(x: Value, weight: Value) -> Gaussian:
    """`x` where positive, `w x` elsewhere; the slope may be random: `min(m, 0)² Var(w)`."""
    value, slope = mean_of(x), mean_of(weight)
    mean = aten.prelu(value, slope)
    parts = []
    if isinstance(x, Gaussian):
        below = slope.reshape(_per_channel(mean)).expand_as(value)
        parts.append(x.scaled(mean, torch.where(value > 0, torch.ones_like(value), below)))
    if isinstance(weight, Gaussian):
        parts.append(_widened(weight, mean).scaled(mean, value.clamp(max=0)))
    return independent_sum(mean, parts)


def matched_prelu(x: Value, weight: Value) -> Gaussian:
    """`relu(x) + w n(x)`, `n(x) = min(x, 0)`, through its first two moments; a random slope is independent of x.

    `Var = Var[relu(x) + E[w] n(x)] + Var(w) (E[n]² + Var[n])`: exact moments of every entry.
    """
    if not isinstance(x, Gaussian):
        return prelu(x, weight)
    slope = mean_of(weight).reshape(_per_channel(x.mean))
    fixed = x.matched(*leaky_relu(x.mean, x.variance, slope))
    if not isinstance(weight, Gaussian):
        return fixed
    mean, variance, share = positive_part(-x.mean, x.variance)
    negative = x.matched(-mean, variance, share)
    wide = _widened(weight, x.mean)
    crossed = x.with_stored(x.mean, x.kind.read(wide) * x.kind.read(negative))
    return independent_sum(fixed.mean, [fixed, wide.scaled(x.mean, negative.mean), crossed])


@builder(aten.prelu.default)
def build_prelu(site: Site) -> Built | None:
    if site.options.activation != "moments":
        return None
    return Built(matched_prelu, site.args, "first two moments matched")


def _per_channel(x: Tensor) -> tuple[int, ...]:
    """The shape that gives a vector of channels to every place of `x [B, C, ...]`."""
    return (1, -1, *[1] * (x.dim() - 2)) if x.dim() > 1 else (-1,)


def _widened(weight: Gaussian, x: Tensor) -> Gaussian:
    """One random slope per channel, at every place of `x`."""
    return weight.reshaped(_per_channel(x)).expanded(x.shape)


@rule(aten.glu.default, note="gate linearised; the variances of its halves as independent, a joint covariance whole")
def glu(x: Gaussian, dim: int = -1) -> Gaussian:
    """`a σ(b)` for the two halves `a, b` of x.

    full:      `J C Jᵀ` with `J t = σ(b) t_a + a σ'(b) t_b`: exact to first order.
    diagonal:  different entries are independent, and so are the halves: the product of two Gaussians.
    """
    a, b = x.mean.chunk(2, dim)
    gate = torch.sigmoid(b)
    rise = gate * (1 - gate)

    def linear(t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim)
        return gate * first + a * rise * second

    def variances(v: Tensor) -> Tensor:
        first, second = v.chunk(2, dim)
        second = second * rise.square()
        return torch.addcmul(first * (gate.square() + second), a.square(), second)

    return x.mapped(a * gate, linear, variances)
