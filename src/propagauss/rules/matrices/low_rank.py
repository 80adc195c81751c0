"""Variances of layers through thin factors: the matrix of spreads as a product of two non-negative ones.

In the diagonal structure a layer has variances `K [m², v]`, with `K = [V | W² + V]` of the size of two weights. It is
non-negative, and in networks close to a matrix of low rank: `K ≈ L R` with `r` columns in `L` costs two thin
products in place of the thick ones, and `L, R >= 0` keeps every variance non-negative.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.images.patches import Settings, convolve
from propagauss.rules.matrices.linear import Others, beside
from propagauss.rules.matrices.precision import in_full_precision

_ROUNDS = 60


def linear_low_rank(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: Tensor,
    right_mean: Tensor | None,
    right_variance: Tensor | None,
    bias_spread: Tensor | None,
    others: Others = None,
) -> Gaussian:
    """`var = L (R_m m² + R_v v) + v_b`, with `right_mean` and `right_variance` of shape `[in, rank]`."""
    m, v = mean_of(x), x.variance if isinstance(x, Gaussian) else None
    spread = in_full_precision(_thin_linear, m, v, left, right_mean, right_variance, bias_spread)
    return Gaussian.diagonal(F.linear(m, weight, bias), beside(spread, others))


def _thin_linear(
    m: Tensor, v: Tensor | None, left: Tensor, of_mean: Tensor | None, of_variance: Tensor | None, own: Tensor | None
) -> Tensor:
    thin = 0.0 if of_mean is None else (m * m) @ of_mean
    if of_variance is not None:
        assert v is not None
        thin = v @ of_variance if of_mean is None else thin + v @ of_variance
    assert isinstance(thin, Tensor)
    return F.linear(thin, left, own)


def convolution_low_rank(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: Tensor,
    right_mean: Tensor | None,
    right_variance: Tensor | None,
    bias_spread: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """The same with convolutions: `rank` kernels on the right, kernels of one place on the left."""
    m, v = mean_of(x), x.variance if isinstance(x, Gaussian) else None
    spread = in_full_precision(_thin_convolution, m, v, left, right_mean, right_variance, bias_spread, settings)
    return Gaussian.diagonal(convolve(m, weight, bias, settings), spread)


def _thin_convolution(
    m: Tensor,
    v: Tensor | None,
    left: Tensor,
    of_mean: Tensor | None,
    of_variance: Tensor | None,
    own: Tensor | None,
    settings: Settings,
) -> Tensor:
    thin = 0.0 if of_mean is None else convolve(m * m, of_mean, None, settings)
    if of_variance is not None:
        assert v is not None
        carried = convolve(v, of_variance, None, settings)
        thin = carried if of_mean is None else thin + carried
    assert isinstance(thin, Tensor)
    one, none = [1] * (m.dim() - 2), [0] * (m.dim() - 2)
    return torch.convolution(thin, left, own, one, none, one, False, none, 1)


def factorise(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Non-negative `L [n, rank]` and `R [rank, p]` with `L R` close to a non-negative `[n, p]` matrix.

    Multiplicative updates for the Kullback-Leibler divergence (Lee and Seung, 2001), whose solution has the row and
    column sums of the matrix itself: what even inputs give is kept exactly. Rank 1 has a closed form.
    """
    matrix = matrix + 1e-12 * matrix.mean() + torch.finfo(matrix.dtype).tiny
    rows, columns, total = matrix.sum(1), matrix.sum(0), matrix.sum()
    left, right = (rows / total)[:, None], columns[None]
    if rank == 1:
        return left, right
    left, right = left * _uneven(len(rows), rank, matrix), right * _uneven(len(columns), rank, matrix).mT / rank
    for _ in range(_ROUNDS):
        left = left * ((matrix / (left @ right)) @ right.mT) / right.sum(1)
        right = right * (left.mT @ (matrix / (left @ right))) / left.sum(0)[:, None]
    return left * (rows / (left @ right.sum(1)))[:, None], right


def _uneven(size: int, rank: int, like: Tensor) -> Tensor:
    """Between 0.5 and 1.5, the same in every run: equal starts would stay equal."""
    generator = torch.Generator().manual_seed(size * 1009 + rank)
    return (0.5 + torch.rand(size, rank, generator=generator)).to(like)
