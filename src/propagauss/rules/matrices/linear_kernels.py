"""What linear layers `h = W a + b` do at run time, one kernel for each structure and kind of layer noise.

With `a` of mean `m` and variances `v`, `W` of variances `V` and `b` of variances `v_b`; see linear.py for the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.gaussian import Gaussian, mean_of
from propagauss.posteriors.base import Noise
from propagauss.posteriors.kronecker import probe
from propagauss.rules.matrices.low_rank import has_low_rank
from propagauss.rules.precision import in_full_precision

# `others` counts the outputs before and after those whose variance is wanted: matrices of variances have no rows for
# them, and their variance is given as 0, for nobody to read.
Others = tuple[int, int] | None


def linear_low_rank(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: Tensor,
    right_mean: Tensor | None,
    right_variance: Tensor | None,
    bias_variance: Tensor | None,
    others: Others = None,
) -> Gaussian:
    """`var = L (R_m m² + R_v v) + v_b`, with `right_mean` and `right_variance` of shape `[in, rank]`."""
    m, v = mean_of(x), x.variance if isinstance(x, Gaussian) else None
    variance = in_full_precision(_low_rank_variance, m, v, left, right_mean, right_variance, bias_variance)
    return Gaussian.diagonal(F.linear(m, weight, bias), beside(variance, others))


def _low_rank_variance(
    m: Tensor, v: Tensor | None, left: Tensor, of_mean: Tensor | None, of_variance: Tensor | None, own: Tensor | None
) -> Tensor:
    narrow = 0.0 if of_mean is None else (m * m) @ of_mean
    if of_variance is not None:
        assert v is not None
        narrow = v @ of_variance if of_mean is None else narrow + v @ of_variance
    assert isinstance(narrow, Tensor)
    return F.linear(narrow, left, own)


@has_low_rank(linear_low_rank, of_mean=3, own=4, setting=5)
def linear_fixed_input(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_variance: Tensor,
    bias_variance: Tensor | None,
    others: Others = None,
) -> Gaussian:
    """Independent weights, fixed input: `var = m² Vᵀ + v_b`. Two products of the size of the layer's own."""
    own = in_full_precision(_own, x, weight_variance, bias_variance)
    return Gaussian.diagonal(F.linear(x, weight, bias), beside(own, others))


@has_low_rank(linear_low_rank, of_mean=3, own=4, of_variance=5, transposed=True, setting=6)
def linear_random_input(
    x: Gaussian,
    weight: Tensor,
    bias: Tensor | None,
    weight_variance: Tensor,
    bias_variance: Tensor | None,
    second_t: Tensor,
    others: Others = None,
) -> Gaussian:
    """Independent weights, random input: `var = m² Vᵀ + v_b + v (W² + V)ᵀ`, the second matrix precomputed."""
    m = x.mean
    both = in_full_precision(_own_and_carried, m, x.variance, weight_variance, bias_variance, second_t)
    return Gaussian.diagonal(F.linear(m, weight, bias), beside(both, others))


@has_low_rank(linear_low_rank, of_variance=3, setting=4)
def linear_fixed_weight(
    x: Gaussian, weight: Tensor, bias: Tensor | None, squared: Tensor, others: Others = None
) -> Gaussian:
    """Fixed weights, random input: `var = v (W²)ᵀ`."""
    carried = in_full_precision(F.linear, x.variance, squared)
    return Gaussian.diagonal(F.linear(x.mean, weight, bias), beside(carried, others))


def _own(m: Tensor, weight_variance: Tensor, bias_variance: Tensor | None) -> Tensor:
    return F.linear(m * m, weight_variance, bias_variance)


def _own_and_carried(
    m: Tensor, v: Tensor, weight_variance: Tensor, bias_variance: Tensor | None, second_t: Tensor
) -> Tensor:
    return _accumulate(F.linear(m * m, weight_variance, bias_variance), v, second_t)


def beside(variance: Tensor, others: Others) -> Tensor:
    """With zeros for the outputs whose variance nobody wants."""
    return variance if others is None else F.pad(variance, others)


class Linear(nn.Module):
    """Any posterior, variances only: `var = noise(m) + v (W² + V)ᵀ` with `V` the marginal variances of the weight."""

    weight: Tensor
    bias: Tensor | None
    second_t: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, noise: Noise, random_input: bool):
        super().__init__()
        self.register_buffer("weight", weight)  # [out, in]
        self.register_buffer("bias", bias)
        self.register_buffer("second_t", second_moment(weight, noise).t() if random_input else None)
        self.noise = noise

    def forward(self, x: Gaussian | Tensor) -> Gaussian:
        m = x if isinstance(x, Tensor) else x.mean
        variance = in_full_precision(self.noise.variance, m)
        if isinstance(x, Gaussian):
            assert self.second_t is not None
            variance = in_full_precision(_accumulate, variance, x.variance, self.second_t)
        return Gaussian.diagonal(F.linear(m, self.weight, self.bias), variance)


class FullLinear(nn.Module):
    """Full: `C' = W C Wᵀ + noise(m, C)`, joint over all positions that share the weight."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, noise: Noise | None, positions: int):
        super().__init__()
        self.register_buffer("weight", weight)  # [out, in]
        self.register_buffer("bias", bias)
        self.noise = noise
        self.positions = positions

    def forward(self, x: Gaussian | Tensor) -> Gaussian:
        m = x if isinstance(x, Tensor) else x.mean
        mean = F.linear(m, self.weight, self.bias)
        c = None if isinstance(x, Tensor) else x.covariance
        if self.positions == 1:
            covariance = in_full_precision(self._one, m.reshape(-1, m.shape[-1]), c)
        else:
            covariance = in_full_precision(self._several, m, c)
        return Gaussian.full(mean, covariance)

    def _one(self, m: Tensor, c: Tensor | None) -> Tensor:
        """`m: [B, in]`, `c: [B, in, in]` -> `[B, out, out]`"""
        noise = None if self.noise is None else self.noise.covariance(m, m, c)
        if c is None or noise is None:
            return self._carried(c, noise)
        weight = self.weight
        return torch.baddbmm(noise, weight.expand(c.shape[0], -1, -1), F.linear(c, weight))

    def _several(self, m: Tensor, c: Tensor | None) -> Tensor:
        """Positions in rows and columns: `m: [B, T, in]`, `c: [B, T * in, T * in]` -> `[B, T * out, T * out]`"""
        (out, inputs), t = self.weight.shape, self.positions
        m = m.reshape(-1, t, inputs)
        blocks = None if c is None else c.reshape(-1, t, inputs, t, inputs).transpose(2, 3)  # [B, T, T, in, in]
        noise = None if self.noise is None else self.noise.covariance(m.unsqueeze(2), m.unsqueeze(1), blocks)
        return self._carried(blocks, noise).transpose(2, 3).reshape(-1, t * out, t * out)

    def _carried(self, c: Tensor | None, noise: Tensor | None) -> Tensor:
        """`W c Wᵀ + noise`"""
        if c is None:
            assert noise is not None
            return noise
        carried = self.weight @ (c @ self.weight.mT)
        return carried if noise is None else carried + noise


def kronecker_layer(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rotation: Tensor,
    right: Tensor,
    patterns: Tensor,
    bias_noise: Tensor | None,
    probes: Tensor | None,
) -> Gaussian:
    """`FullLinear` with a `KroneckerNoise` (see there for the formula), for one position per sample, in few calls."""
    m = x if isinstance(x, Tensor) else x.mean
    rows = m if m.dim() == 2 else m.reshape(-1, m.shape[-1])
    c = None if isinstance(x, Tensor) else x.covariance
    noise = in_full_precision(_kronecker, rows, c, weight, rotation, right, patterns, bias_noise, probes)
    return Gaussian.full(F.linear(m, weight, bias), noise)


def _kronecker(
    rows: Tensor,
    c: Tensor | None,
    weight: Tensor,
    rotation: Tensor,
    right: Tensor,
    patterns: Tensor,
    bias_noise: Tensor | None,
    probes: Tensor | None,
) -> Tensor:
    coefficients = (rows @ rotation).square() @ right
    if c is not None:
        coefficients = coefficients + probe(c, probes, rotation, right)
    out = weight.shape[0]
    noise = coefficients @ patterns if bias_noise is None else torch.addmm(bias_noise, coefficients, patterns)
    noise = noise.view(-1, out, out)
    if c is not None:
        noise = torch.baddbmm(noise, weight.expand(c.shape[0], -1, -1), F.linear(c, weight))
    return noise


def second_moment(weight: Tensor, noise: Noise | None) -> Tensor:
    """`E[W²]`, entry by entry."""
    variance = None if noise is None else noise.weight_variance()
    return weight.square() if variance is None else weight.square() + variance


def _accumulate(start: Tensor, v: Tensor, matrix_t: Tensor) -> Tensor:
    """`start + v @ matrix_t`, as one accumulating product where the shapes allow it."""
    return torch.addmm(start, v, matrix_t) if v.dim() == 2 else start + v @ matrix_t
