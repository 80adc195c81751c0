"""Pooling and resampling of feature maps: linear maps, so exact, and maxima routed by the mean.

A linear map `y = A x` of a diagonal covariance has `var_y = (A ∘ A) v`. Averages have equal coefficients in a window
and interpolation separates over the axes, so the squares cost as little as the op. What is lost in the diagonal
structure is that windows overlap, and that copies are the same random number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian
from propagauss.rules.entries.shape import _move, _named
from propagauss.rules.registry import rule

aten = torch.ops.aten

MOVES = [
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.channel_shuffle.default,
    aten.native_channel_shuffle.default,
    aten.im2col.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    *(
        getattr(getattr(aten, f"{kind}{n}d"), overload)
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 2, 3)
        for overload in ("default", "vec")
    ),
]

for _op in MOVES:
    rule(_op, note="exact")(_move(_op))
rule(aten.col2im.default, note="exact sums (diagonal: they count as independent)")(_move(aten.col2im.default))


# -- averages


def _average(op: Any, n: int) -> Callable[..., Gaussian]:
    def average_pool(
        x: Gaussian,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Gaussian:
        """`Var[w Σ x_i] = w² Σ v_i`; the weight `w` is 1 / window, smaller windows at the edges apart."""
        rest = (ceil_mode, count_include_pad) if n == 1 else (ceil_mode, count_include_pad, divisor_override)

        def pool(t: Tensor) -> Tensor:
            return op(t, kernel, stride, padding, *rest)

        def squared(v: Tensor) -> Tensor:
            if divisor_override is not None:
                return pool(v) / divisor_override
            if not ceil_mode and (count_include_pad or not any(_each(padding, n))):
                return pool(v) / math.prod(_each(kernel, n))
            ones = v.new_ones((1, *v.shape[-n:]))
            return pool(v) * (pool(ones) / _window_sums(ones, n, kernel, stride, padding, ceil_mode))

        return x.mapped(pool(x.mean), pool, squared)

    return _named(average_pool, op)


def _window_sums(t: Tensor, n: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool) -> Tensor:
    if n == 1:  # the op has no divisor of its own
        lifted = ((1, *_each(kernel, 1)), (1, *_each(stride, 1)) if stride else (), (0, *_each(padding, 1)))
        return aten.avg_pool2d(t.unsqueeze(-2), *lifted, ceil_mode, True, 1).squeeze(-2)
    op = aten.avg_pool2d if n == 2 else aten.avg_pool3d
    return op(t, kernel, stride, padding, ceil_mode, True, 1)


def _adaptive_average(op: Any, n: int) -> Callable[..., Gaussian]:
    def adaptive_average_pool(x: Gaussian, sizes: Any) -> Gaussian:
        """`Var[mean] = Σ v_i / n²`, with windows of size n that differ where the sizes do not divide."""

        def pool(t: Tensor) -> Tensor:
            return op(t, sizes)

        def squared(v: Tensor) -> Tensor:
            averaged, divisor = pool(v), 1
            for axis, (size, out) in enumerate(zip(v.shape[-n:], averaged.shape[-n:], strict=True)):
                if size % out == 0:
                    divisor *= size // out
                else:
                    averaged = averaged / _windows(size, out, v).reshape(-1, *[1] * (n - 1 - axis))
            return averaged / divisor

        return x.mapped(pool(x.mean), pool, squared)

    return _named(adaptive_average_pool, op)


def _windows(size: int, out: int, like: Tensor) -> Tensor:
    """Window i runs from ⌊i size / out⌋ to ⌈(i + 1) size / out⌉; their lengths, `[out]`."""
    i = torch.arange(out, device=like.device)
    return (-((i + 1) * -size // out) - i * size // out).to(like.dtype)


for _n in (1, 2, 3):
    for _name, _make in (("avg_pool", _average), ("adaptive_avg_pool", _adaptive_average)):
        _op = getattr(aten, f"{_name}{_n}d").default
        rule(_op, note="exact")(_make(_op, _n))
rule(aten._adaptive_avg_pool2d.default, note="exact")(_adaptive_average(aten._adaptive_avg_pool2d.default, 2))
rule(aten._adaptive_avg_pool3d.default, note="exact")(_adaptive_average(aten._adaptive_avg_pool3d.default, 3))


# -- maxima


def _routed(op: Any, n: int, with_indices: bool) -> Callable[..., Any]:
    def max_pool(x: Gaussian, *args: Any, **kwargs: Any) -> Any:
        """The entry with the largest mean stands for its window; too certain where several are about as large."""
        index = op(x.mean, *args, **kwargs)[1]

        def route(t: Tensor) -> Tensor:
            return t.flatten(-n).gather(-1, index.flatten(-n)).reshape(index.shape)

        pooled = x.mapped(route(x.mean), route)
        return (pooled, index) if with_indices else pooled

    return max_pool


for _n in (1, 2, 3):
    _indexed, _adaptive = getattr(aten, f"max_pool{_n}d_with_indices"), getattr(aten, f"adaptive_max_pool{_n}d")
    for _op, _finder, _both in (
        (getattr(aten, f"max_pool{_n}d").default, _indexed.default, False),
        (_indexed.default, _indexed.default, True),
        (_adaptive.default, _adaptive.default, True),
    ):
        rule(_op, note="routed by the largest mean")(_named(_routed(_finder, _n, _both), _op))


def _unpooled(op: Any) -> Callable[..., Gaussian]:
    def max_unpool(x: Gaussian, index: Tensor, *args: Any) -> Gaussian:
        return x.mapped(op(x.mean, index, *args), lambda t: op(t, index, *args))

    return _named(max_unpool, op)


for _op in (aten.max_unpool2d.default, aten.max_unpool3d.default):
    rule(_op, note="exact")(_unpooled(_op))


# -- interpolation


def _interpolated(op: Any, plain: Any, n: int) -> Callable[..., Gaussian]:
    from_list = op is not plain  # scales come as a list, or as one argument per axis

    def interpolate(x: Gaussian, sizes: Any, align_corners: bool, scales: Any = None, *more: Any) -> Gaussian:
        """Separable: `y = (A_1 ⊗ ... ⊗ A_n) x`, so `var = (A_1² ⊗ ... ⊗ A_n²) v`, one axis after the other."""
        factors = (scales or [None] * n) if from_list else [scales, *more, *[None] * (n - 1 - len(more))]

        def resample(t: Tensor) -> Tensor:
            return op(t, sizes, align_corners, scales, *more)

        mean = resample(x.mean)

        def squared(v: Tensor) -> Tensor:
            for axis, (size, scale) in enumerate(zip(mean.shape[-n:], factors, strict=True)):
                matrix = _coefficients(plain, n, axis, v, size, align_corners, scale)
                v = (v.transpose(axis - n, -1) @ matrix.square()).transpose(axis - n, -1)
            return v

        return x.mapped(mean, resample, squared)

    return _named(interpolate, op)


def _coefficients(
    op: Any, n: int, axis: int, like: Tensor, size: int, align_corners: bool, scale: float | None
) -> Tensor:
    """The interpolation along one axis as a matrix, `[size before, size after]`: what it makes of unit vectors.

    The other axes stay at 2 entries: antialiasing on the CPU is wrong for an output of width 1 (torch 2.13).
    """
    before = like.shape[axis - n]
    scales: list[float | None] = [None] * n
    lifted, wide, sizes = [1] * n, [2] * n, [2] * n
    lifted[axis], wide[axis], sizes[axis], scales[axis] = before, before, size, scale
    unit = torch.eye(before, dtype=like.dtype, device=like.device).reshape(before, 1, *lifted)
    result = op(unit.expand(before, 1, *wide).contiguous(), sizes, align_corners, *scales)
    return result.movedim(2 + axis, -1).reshape(before, -1, size)[:, 0]


for _kind, _n in (
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("upsample_trilinear3d", 3),
    ("upsample_bicubic2d", 2),
    ("_upsample_bilinear2d_aa", 2),
    ("_upsample_bicubic2d_aa", 2),
):
    for _op in (getattr(aten, _kind).default, getattr(aten, _kind).vec):
        rule(_op, note="exact")(_interpolated(_op, getattr(aten, _kind).default, _n))


def _each(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values
