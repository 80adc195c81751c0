"""What convolutions do at run time in the diagonal structure, one kernel for each kind of posterior.

`*` is a convolution; the input has mean `m` and variances `v`, the weight variances `V`, the bias `v_b`. See
convolution.py for the choice, full_convolution.py for the full structure.
"""

from __future__ import annotations

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.images.patches import Settings, convolve
from propagauss.rules.matrices.low_rank import has_low_rank
from propagauss.rules.precision import in_full_precision


def convolution_low_rank(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: Tensor,
    right_mean: Tensor | None,
    right_variance: Tensor | None,
    bias_variance: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """`var = L * (R_m * m² + R_v * v) + v_b`: `rank` kernels on the right, kernels of one place on the left."""
    m, v = mean_of(x), x.variance if isinstance(x, Gaussian) else None
    variance = in_full_precision(_low_rank_variance, m, v, left, right_mean, right_variance, bias_variance, settings)
    return Gaussian.diagonal(convolve(m, weight, bias, settings), variance)


def _low_rank_variance(
    m: Tensor,
    v: Tensor | None,
    left: Tensor,
    of_mean: Tensor | None,
    of_variance: Tensor | None,
    own: Tensor | None,
    settings: Settings,
) -> Tensor:
    narrow = 0.0 if of_mean is None else convolve(m * m, of_mean, None, settings)
    if of_variance is not None:
        assert v is not None
        carried = convolve(v, of_variance, None, settings)
        narrow = carried if of_mean is None else narrow + carried
    assert isinstance(narrow, Tensor)
    one, none = [1] * (m.dim() - 2), [0] * (m.dim() - 2)
    return torch.convolution(narrow, left, own, one, none, one, False, none, 1)


@has_low_rank(convolution_low_rank, of_variance=3, setting=4)
def convolution_fixed_weight(
    x: Gaussian, weight: Tensor, bias: Tensor | None, squared: Tensor, settings: Settings
) -> Gaussian:
    """Fixed weights, random input: `var = v * W²`; in the full structure both sides of the covariance go through."""
    mean = convolve(x.mean, weight, bias, settings)
    return x.mapped(
        mean, lambda t: convolve(t, weight, None, settings), lambda v: _convolved(v, squared, None, settings)
    )


def convolution_random_bias(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor,
    bias_variance: Tensor,
    second: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """Only the bias is random: `var = v_b + v * W²`."""
    mean = convolve(mean_of(x), weight, bias, settings)
    own = bias_variance.reshape(-1, *[1] * (mean.dim() - 2)).expand_as(mean)
    return Gaussian.diagonal(mean, _with_input(own, x, second, settings))


@has_low_rank(convolution_low_rank, of_mean=3, own=4, of_variance=5, setting=6)
def convolution_independent(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_variance: Tensor,
    bias_variance: Tensor | None,
    second: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """Independent weights: `var = m² * V + v_b + v * (W² + V)`, the last kernel precomputed."""
    m = mean_of(x)
    own = in_full_precision(_own, m, weight_variance, bias_variance, settings)
    return Gaussian.diagonal(convolve(m, weight, bias, settings), _with_input(own, x, second, settings))


def convolution_rotated(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rotation: Tensor,
    mixing: Tensor,
    bias_variance: Tensor | None,
    second: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """Kronecker posterior: `var_o = Σ_q D_oq (Q_Aᵀ m_l)²_q + v_b + v * (W² + V)`, `D_oq = Σ_p (Q_B)²_op G_pq`.

    `Q_Aᵀ m_l` at all places is a convolution with the eigenvectors as kernels: no patch is ever unfolded.
    """
    m = mean_of(x)
    own = in_full_precision(_rotated, m, rotation, mixing, bias_variance, settings)
    return Gaussian.diagonal(convolve(m, weight, bias, settings), _with_input(own, x, second, settings))


def convolution_rooted(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    roots: Tensor,
    offsets: Tensor | None,
    second: Tensor | None,
    settings: Settings,
    weight_variance: Tensor | None = None,
    bias_variance: Tensor | None = None,
) -> Gaussian:
    """Any joint posterior: `var_o = Σ_r (R_or * m + ρ_or)² + v * (W² + V)`.

    `(R_or, ρ_or)` are the columns of a root of the joint covariance of `(W_o, b_o)`: a sum of squares, never negative.
    They may be few, with a `weight_variance` of independent weights beside them.
    """
    m = mean_of(x)
    mean = convolve(m, weight, bias, settings)
    squares = _convolved(m, roots, offsets, settings).square()
    own = squares.unflatten(1, (mean.shape[1], -1)).sum(2)
    if weight_variance is not None:
        own = own + in_full_precision(_own, m, weight_variance, bias_variance, settings)
    return Gaussian.diagonal(mean, _with_input(own, x, second, settings))


def convolution_of_values(
    x: Gaussian | Tensor, weight: Gaussian | Tensor, bias: Gaussian | Tensor | None, settings: Settings
) -> Gaussian:
    """A weight that the model computes: `var = m² * V + v * (W² + V) + v_b`, all operands taken as independent."""
    w, b = mean_of(weight), None if bias is None else mean_of(bias)
    mean = convolve(mean_of(x), w, b, settings)
    if isinstance(x, Gaussian) and isinstance(weight, Tensor) and not isinstance(bias, Gaussian):
        return x.mapped(mean, lambda t: convolve(t, w, None, settings), lambda v: _convolved(v, w * w, None, settings))
    weight_variance = torch.zeros_like(w) if isinstance(weight, Tensor) else weight.variance
    bias_variance = bias.variance if isinstance(bias, Gaussian) else None
    own = in_full_precision(_own, mean_of(x), weight_variance, bias_variance, settings)
    return Gaussian.diagonal(mean, _with_input(own, x, w.square() + weight_variance, settings))


def _with_input(own: Tensor, x: Gaussian | Tensor, second: Tensor | None, settings: Settings) -> Tensor:
    """Add what the input variances contribute through the second moment of the weight: `own + v * E[W²]`."""
    if isinstance(x, Tensor):
        return own
    assert second is not None
    return own + _convolved(x.variance, second, None, settings)


def _own(m: Tensor, weight_variance: Tensor, bias_variance: Tensor | None, settings: Settings) -> Tensor:
    return convolve(m * m, weight_variance, bias_variance, settings)


def _rotated(m: Tensor, rotation: Tensor, mixing: Tensor, bias_variance: Tensor | None, settings: Settings) -> Tensor:
    flat, none = [1] * (m.dim() - 2), [0] * (m.dim() - 2)
    squares = convolve(m, rotation, None, settings).square()
    return torch.convolution(squares, mixing, bias_variance, flat, none, flat, False, none, settings[-1])


def _convolved(values: Tensor, kernels: Tensor, offsets: Tensor | None, settings: Settings) -> Tensor:
    return in_full_precision(convolve, values, kernels, offsets, settings)
