"""Variances of layers through low-rank factors: the matrix of variances as a product of two non-negative ones.

In the diagonal structure a layer has variances `K [m², v] + k`, with `K = [V | W² + V]` of the size of two weights. It
is non-negative, and in networks close to a matrix of low rank: `K ≈ L R` with `r` columns in `L` costs two products
with few columns in place of the large ones, and `L, R >= 0` keeps every variance non-negative.

A kernel that has such a form says so with `@has_low_rank`, which notes where its arguments hold `K` and `k`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROUNDS = 60


@dataclass(frozen=True)
class LowRankForm:
    """Where the arguments `(x, weight, bias, ...)` of a kernel hold the parts of its variances, counted from 0.

    `form` takes `(x, weight, bias, L, R_m, R_v, k, setting)`.
    """

    form: Callable[..., Any]
    setting: int  # which outputs, or how a convolution moves: handed on as it is
    of_mean: int | None = None  # the part of K that meets m²
    of_variance: int | None = None  # the part of K that meets v
    transposed: bool = False  # that part is stored as [in, out]
    own: int | None = None  # k

    def parts(self, args: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None]:
        """What meets `m²`, and what meets `v`, each with a row for each output."""
        of_variance = _at(args, self.of_variance)
        return _at(args, self.of_mean), of_variance.t() if self.transposed else of_variance

    def arguments(self, args: tuple[Any, ...], left: Any, right_mean: Any, right_variance: Any) -> tuple[Any, ...]:
        """Those of the low-rank form, from those of the kernel and the factors."""
        return (*args[:3], left, right_mean, right_variance, _at(args, self.own), _at(args, self.setting))


def _at(args: tuple[Any, ...], position: int | None) -> Any:
    return args[position] if position is not None and position < len(args) else None


FORMS: dict[Any, LowRankForm] = {}


def has_low_rank(form: Callable[..., Any], **where: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say which form a kernel has with low-rank factors, and where its arguments are; see `LowRankForm`."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        FORMS[kernel] = LowRankForm(form, **where)
        return kernel

    return register


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
