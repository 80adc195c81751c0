"""Elementwise functions `y = g(x)`, of one op or of several fused ones.

linearise:  mean `g(m)`, covariance `D C D` with `D = diag(g'(m))`.
moments:    mean `E[g(x)]`, variances `Var[g(x)]`, and `Cov(y_i, y_j) ≈ E[g'(x_i)] C_ij E[g'(x_j)]` off the diagonal.

Linearisation is exact to first order in the variance; it is bad where `g` bends within a standard deviation of the mean
(a ReLU with its mean near zero passes all of the variance or none of it). The off-diagonal form of `moments` is the
first term of the Hermite series and never makes the covariance indefinite, since `Var[g] >= E[g']² v`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from propagauss.gaussian import Gaussian
from propagauss.rules.elementwise.moments import MOMENTS, Moments, of_pieces
from propagauss.rules.elementwise.piecewise import as_pieces
from propagauss.rules.elementwise.quadrature.borders import Borders
from propagauss.rules.elementwise.quadrature.fineness import fineness, split_panels
from propagauss.rules.elementwise.quadrature.panels import legendre, quadrature
from propagauss.rules.elementwise.quadrature.stretched import Stretched, stretched
from propagauss.rules.elementwise.quadrature.two_scales import TwoScales, two_scales
from propagauss.rules.elementwise.slopes import UNARY, Derivative, as_slope, with_slope

aten = torch.ops.aten
Settings = tuple[tuple[Any, ...], dict[str, Any]]  # the op's other arguments, such as a slope
NONE: Settings = ((), {})


class Elementwise(nn.Module):
    """Linearised; `rest` are plain tensors that the function also needs.

    With its graph, the derivative is written out as far as `slopes` knows it; else by forward-mode differentiation.
    """

    def __init__(self, function: Callable[..., Tensor], graph: fx.GraphModule | None = None):
        super().__init__()
        self.function = function
        self.with_slope = None if graph is None else with_slope(graph)

    def forward(self, x: Gaussian, *rest: Any) -> Gaussian:
        m = x.mean
        if self.with_slope is not None:
            return x.scaled(*self.with_slope(m, *rest))
        result = torch.func.jvp(lambda t: self.function(t, *rest), (m,), (torch.ones_like(m),))
        return x.scaled(result[0], result[1])


class MomentMatched(nn.Module):
    """An elementwise function through its first two moments: in closed form where known, else by quadrature.

    Smooth activations and functions with one kink have rules of their own. With its graph, quadrature on panels knows
    where the function jumps, has a kink or ends, and how fine panels have to be; else it looks around zero only.
    """

    base: Tensor
    nodes: Tensor
    weights: Tensor

    def __init__(
        self,
        function: Callable[..., Tensor],
        closed: Moments | None,
        settings: Settings,
        dtype: torch.dtype,
        graph: fx.GraphModule | None = None,
    ):
        super().__init__()
        self.function = function
        self.closed, self.settings = closed, settings
        self.pieces = None if closed is not None or graph is None else as_pieces(graph)
        self.scales: TwoScales | Stretched | None = None
        self.limit = ""  # for the plan: where the moments are not right, if that is known
        if closed is None and self.pieces is None and graph is not None:
            self.scales = two_scales(graph, dtype)
        if closed is None and self.pieces is None and self.scales is None:
            self.borders = Borders(graph)
            self.scales = None if graph is None else stretched(graph, self.borders, dtype)
        if closed is None and self.pieces is None and self.scales is None:
            fine = fineness(graph, self.borders)
            self.limit = fine.limit
            self.register_buffer("base", split_panels(fine.splits, dtype))
            for name, value in zip(("nodes", "weights"), legendre(dtype), strict=True):
                self.register_buffer(name, value)

    def moments(self, m: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`E[g]`, `Var[g]` and `E[g']`."""
        if self.closed is not None:
            return self.closed(m, v, *self.settings[0], **self.settings[1])
        if self.scales is not None:
            return self.scales(m, v)
        if self.pieces is None:
            return quadrature(
                lambda t: self.function(t, *rest),
                (m, v),
                (self.base, self.nodes, self.weights),
                lambda *at: self.borders(*at, *rest),
                self.borders.room(m, *rest),
                self.borders.is_total,
            )
        return of_pieces(self.pieces, self.function, m, v)

    def forward(self, x: Gaussian, *rest: Any) -> Gaussian:
        scales = self.scales
        if scales is not None and not x.kind.joint:  # no slope; and a call of the module costs as much as an op
            return x.matched(*scales.forward(x.mean, x.variance, slope=False))
        return matched(x, *self.moments(x.mean, x.variance, *rest))


def matched(x: Gaussian, mean: Tensor, variance: Tensor, slope: Tensor) -> Gaussian:
    """The Gaussian with these moments; deviations in common with other entries go through the mean slope."""
    return x.matched(mean, variance, slope)


def elementwise(
    function: Callable[..., Tensor],
    mode: str,
    dtype: torch.dtype,
    op: Any = None,
    settings: Settings = NONE,
    graph: fx.GraphModule | None = None,
) -> nn.Module:
    """The module for an elementwise function; `op` and `settings` if it is that op on its first argument.

    `graph` is the same function op by op, for its derivative.
    """
    if mode == "moments":
        return MomentMatched(function, MOMENTS.get(op), settings, dtype, graph)
    return Elementwise(function, graph)


# -- single ops, without a module around them


def closed(function: Any, derivative: Derivative) -> Callable[..., Gaussian]:
    """A linearised op with a derivative in closed form, as a rule that takes the op's own arguments."""

    def linearised(x: Gaussian, *settings: Any, **named: Any) -> Gaussian:
        m = x.mean
        y = function(m, *settings, **named)
        return x.scaled(y, as_slope(y, derivative(m, y, *settings, **named)))

    linearised.__name__ = f"linearised_{function._opname}"
    return linearised


def gated(function: Any, passes: Derivative) -> Callable[..., Gaussian]:
    """As `closed`, for a derivative that is only ever 0 or 1, so that its square is itself."""

    def linearised(x: Gaussian, *settings: Any, **named: Any) -> Gaussian:
        m = x.mean
        y = function(m, *settings, **named)
        return x.gated(y, passes(m, y, *settings, **named))

    linearised.__name__ = f"linearised_{function._opname}"
    return linearised


def relu(x: Gaussian) -> Gaussian:
    """`relu(m)`, variances where the mean is positive."""
    y = x.mean.relu()
    return x.gated(y, y.sign())  # 1 where the mean is positive: cheaper than a comparison and a cast


GATED = (aten.relu6, aten.hardtanh, aten.hardshrink, aten.softshrink, aten.threshold)
CLOSED: dict[Any, Callable[..., Gaussian]] = {op: closed(op, derivative) for op, derivative in UNARY.items()}
CLOSED |= {op.default: gated(op.default, UNARY[op.default]) for op in GATED}
CLOSED |= {aten.relu.default: relu}
