"""Elementwise functions `y = g(x)`, of one op or of several fused ones.

linearise:  mean `g(m)`, covariance `D C D` with `D = diag(g'(m))`.
moments:    mean `E[g(x)]`, variances `Var[g(x)]`, and `Cov(y_i, y_j) ≈ E[g'(x_i)] C_ij E[g'(x_j)]` off the diagonal.

Linearisation is exact to first order in the variance; it is bad where `g` bends within a standard deviation of the mean
(a ReLU with its mean near zero passes all of the variance or none of it). The off-diagonal form of `moments` is the
first term of the Hermite series and never makes the covariance indefinite, since `Var[g] >= E[g']² v`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.gaussian import Gaussian
from propagauss.rules.moments import MOMENTS, Moments, quadrature

aten = torch.ops.aten
Derivative = Callable[..., Tensor]  # (mean, g(mean), *settings of the op) -> g'(mean)
Settings = tuple[tuple[Any, ...], dict[str, Any]]  # the op's other arguments, such as a slope
NONE: Settings = ((), {})


class Elementwise(nn.Module):
    """Linearised, with the derivative by forward-mode differentiation; `rest` are plain tensors it also needs."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Gaussian, *rest: Any) -> Gaussian:
        m = x.mean
        result = torch.func.jvp(lambda t: self.function(t, *rest), (m,), (torch.ones_like(m),))
        return x.scaled(result[0], result[1])


class MomentMatched(nn.Module):
    """An elementwise function through its first two moments: closed where known, else by Gauss-Hermite quadrature."""

    nodes: Tensor
    weights: Tensor

    def __init__(
        self,
        function: Callable[..., Tensor],
        closed: Moments | None,
        settings: Settings,
        dtype: torch.dtype,
        order: int = 64,
    ):
        super().__init__()
        self.function = function
        self.closed = closed
        self.settings = settings
        nodes, weights = np.polynomial.hermite_e.hermegauss(order)
        self.register_buffer("nodes", torch.tensor(nodes, dtype=dtype))
        self.register_buffer("weights", torch.tensor(weights / math.sqrt(2 * math.pi), dtype=dtype))

    def forward(self, x: Gaussian, *rest: Any) -> Gaussian:
        v = x.variance
        if self.closed is not None:
            mean, variance, slope = self.closed(x.mean, v, *self.settings[0], **self.settings[1])
        else:
            mean, variance, slope = quadrature(lambda t: self.function(t, *rest), x.mean, v, self.nodes, self.weights)
        if not x.is_full:
            return Gaussian.diagonal(mean, variance)
        batch, n, _ = x.covariance.shape
        carried = x.scaled(mean, slope).covariance
        extra = (variance - slope.square() * v).clamp(min=0).reshape(batch, n)
        return Gaussian.full(mean, carried + torch.diag_embed(extra))


def elementwise(
    function: Callable[..., Tensor], mode: str, dtype: torch.dtype, op: Any = None, settings: Settings = NONE
) -> nn.Module:
    """The module for an elementwise function; `op` and `settings` if it is that op on its first argument."""
    if mode == "moments":
        return MomentMatched(function, MOMENTS.get(op), settings, dtype)
    return Elementwise(function)


# -- derivatives in closed form


def _gelu(m: Tensor, y: Tensor, approximate: str = "none") -> Tensor:
    return aten.gelu_backward(torch.ones_like(m), m, approximate=approximate)  # one kernel, where the formula takes ten


def _silu(m: Tensor, y: Tensor) -> Tensor:
    s = torch.sigmoid(m)
    return s + y * (1 - s)


def _softplus(m: Tensor, y: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    return torch.where(m * beta > threshold, 1.0, torch.sigmoid(m * beta))


def _elu(m: Tensor, y: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return torch.where(m > 0, torch.full_like(m, scale), input_scale * (y + alpha * scale))


def _leaky(m: Tensor, y: Tensor, negative_slope: float = 0.01) -> Tensor:
    return torch.where(m > 0, torch.ones_like(m), torch.full_like(m, negative_slope))


def _selu(m: Tensor, y: Tensor) -> Tensor:
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return _elu(m, y, alpha, scale)


def _mish(m: Tensor, y: Tensor) -> Tensor:
    """`y = m t` with `t = tanh(softplus(m))`"""
    t = torch.tanh(F.softplus(m))
    return t + m * (1 - t * t) * torch.sigmoid(m)


def _clip(m: Tensor, y: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    return (m > min_val) & (m < max_val)


def closed(function: Callable[..., Tensor], derivative: Derivative) -> Callable[..., Gaussian]:
    """A linearised op with a derivative in closed form, as a rule that takes the op's own arguments."""

    def linearised(x: Gaussian, *settings: Any, **named: Any) -> Gaussian:
        m = x.mean
        y = function(m, *settings, **named)
        return x.scaled(y, derivative(m, y, *settings, **named))

    linearised.__name__ = f"linearised_{getattr(function, '__name__', 'function')}"
    return linearised


def gated(function: Callable[..., Tensor], passes: Derivative) -> Callable[..., Gaussian]:
    """As `closed`, for a derivative that is only ever 0 or 1, so that its square is itself."""

    def linearised(x: Gaussian, *settings: Any, **named: Any) -> Gaussian:
        m = x.mean
        y = function(m, *settings, **named)
        gate = passes(m, y, *settings, **named)
        return x.scaled(y, gate.to(m.dtype)) if x.is_full else Gaussian.diagonal(y, x.variance * gate)

    linearised.__name__ = f"linearised_{function.__name__}"
    return linearised


def relu(x: Gaussian) -> Gaussian:
    """`relu(m)`, variances where the mean is positive."""
    y = x.mean.relu()
    gate = y.sign()  # 1 where the mean is positive: cheaper than a comparison and a cast
    return x.scaled(y, gate) if x.is_full else Gaussian.diagonal(y, x.variance * gate)


CLOSED: dict[Any, Callable[..., Gaussian]] = {
    aten.relu.default: relu,
    aten.relu6.default: gated(F.relu6, lambda m, y: (m > 0) & (m < 6)),
    aten.hardtanh.default: gated(F.hardtanh, _clip),
    aten.hardsigmoid.default: closed(F.hardsigmoid, lambda m, y: ((m > -3) & (m < 3)).to(m.dtype) / 6),
    aten.leaky_relu.default: closed(F.leaky_relu, _leaky),
    aten.sigmoid.default: closed(torch.sigmoid, lambda m, y: y * (1 - y)),
    aten.tanh.default: closed(torch.tanh, lambda m, y: 1 - y * y),
    aten.gelu.default: closed(F.gelu, _gelu),
    aten.silu.default: closed(F.silu, _silu),
    aten.softplus.default: closed(F.softplus, _softplus),
    aten.elu.default: closed(aten.elu, _elu),
    aten.selu.default: closed(F.selu, _selu),
    aten.mish.default: closed(F.mish, _mish),
    aten.hardshrink.default: gated(F.hardshrink, lambda m, y, lambd=0.5: m.abs() > lambd),
    aten.exp.default: closed(torch.exp, lambda m, y: y),
    aten.log.default: closed(torch.log, lambda m, y: m.reciprocal()),
    aten.sin.default: closed(torch.sin, lambda m, y: m.cos()),
    aten.cos.default: closed(torch.cos, lambda m, y: -m.sin()),
    aten.sqrt.default: closed(torch.sqrt, lambda m, y: 0.5 / y),
    aten.rsqrt.default: closed(torch.rsqrt, lambda m, y: -0.5 * y / m),
    aten.abs.default: closed(torch.abs, lambda m, y: m.sign()),
    aten.square.default: closed(torch.square, lambda m, y: 2 * m),
    aten.reciprocal.default: closed(torch.reciprocal, lambda m, y: -y * y),
    aten.log_sigmoid.default: closed(F.logsigmoid, lambda m, y: torch.sigmoid(-m)),
}
