"""Adjoints of convolution and pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.rules.adjoints.registry import adjoint, pulled_back

aten = torch.ops.aten
CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
BLOCK_ENTRIES = 2**19  # of sensitivities in one convolution: more would leave the cache, and its copies the heap
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
_FORTH = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_BACK = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def _each(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def settings(
    w: Tensor, b: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding and dilation for every dimension of the kernel."""
    stride, padding, dilation = (_each(v, w.dim() - 2) for v in (stride, padding, dilation))
    return stride, padding, dilation


@adjoint(*CONVOLUTIONS)
def convolution(
    g: Tensor,
    i: int,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """The transposed convolution, with as much added at the end as the stride left out."""
    lead, n = g.shape[: g.dim() - y.dim()], w.dim() - 2
    stride, padding, dilation = settings(w, b, stride, padding, dilation)
    if i != 0 or x.dim() < w.dim():  # a weight or bias where nothing has samples, or one image without a batch
        return pulled_back(g, (i,), CONVOLUTIONS[n - 1], y, x, w, b, stride, padding, dilation, groups)
    extra = [
        x.shape[2 + d] - ((y.shape[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (w.shape[2 + d] - 1) + 1)
        for d in range(n)
    ]
    folded = g.reshape(-1, *y.shape[1:])
    if max(w.shape[2:]) == 1 < max(stride) and not any(padding):  # a product, quicker than PyTorch's convolution
        found = _BACK[x.dim()](folded, w, None, 1, 0, 0, groups)
        return _with_gaps(found, stride, x.shape[2:]).reshape(*lead, *x.shape)
    whole = torch.compiler.is_compiling() or not g.is_cpu or folded.numel() <= BLOCK_ENTRIES
    parts = (folded,) if whole else folded.split(max(1, BLOCK_ENTRIES // folded[0].numel()))
    found = [_BACK[x.dim()](few, w, None, stride, padding, extra, groups, dilation) for few in parts]
    return (found[0] if whole else torch.cat(found)).reshape(*lead, *x.shape)


def _with_gaps(t: Tensor, stride: list[int], sizes: Any) -> Tensor:
    """Entries of an image with zeros between them, where a stride left some out."""
    shape = [t.shape[0], t.shape[1]]
    apart = t.reshape(*shape, *(s for size in t.shape[2:] for s in (size, 1)))
    apart = F.pad(apart, [p for step in reversed(stride) for p in (0, step - 1, 0, 0)])
    whole = apart.reshape(*shape, *(size * step for size, step in zip(t.shape[2:], stride, strict=True)))
    for d, size in enumerate(sizes):
        whole = whole.narrow(2 + d, 0, size)
    return whole


@adjoint(*CONVOLUTIONS, per_sample=True)
def convolution_per_sample(
    g: Tensor,
    i: int,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """`M_k = Σ_t g_kt p_tᵀ` with the patch `p_t` of each position; `Σ_t g_kt` for the bias."""
    if i == 2:
        return g.flatten(3).sum(3)
    found = patches(x, w, *settings(w, b, stride, padding, dilation))  # [B, C, kernel, T]
    k, batch = g.shape[:2]
    split = found.reshape(batch, groups, -1, found.shape[-1])  # [B, G, C/G kernel, T]
    parts = g.reshape(k, batch, groups, w.shape[0] // groups, -1)
    return (parts @ split.mT).reshape(k, batch, *w.shape)


def patches(x: Tensor, w: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    n = w.dim() - 2
    if n == 2:
        found = F.unfold(x, w.shape[2:], dilation, padding, stride)  # type: ignore[arg-type]
        return found.reshape(x.shape[0], x.shape[1], -1, found.shape[-1])
    if n == 1:
        found = F.unfold(x.unsqueeze(2), (1, w.shape[2]), (1, dilation[0]), (0, padding[0]), (1, stride[0]))
        return found.reshape(x.shape[0], x.shape[1], -1, found.shape[-1])
    x = F.pad(x, [p for d in reversed(padding) for p in (d, d)])
    for d in range(n):
        reach = dilation[d] * (w.shape[2 + d] - 1) + 1
        x = x.unfold(2 + d, reach, stride[d])[..., :: dilation[d]]
    inner = list(range(2, 2 + n))
    x = x.permute(0, 1, *range(2 + n, 2 + 2 * n), *inner)
    return x.flatten(2 + n).flatten(2, 1 + n)


@adjoint(*TRANSPOSED)
def transposed_convolution(
    g: Tensor,
    i: int,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """The convolution."""
    lead, n = g.shape[: g.dim() - y.dim()], w.dim() - 2
    if i != 0 or x.dim() < w.dim():  # a weight or bias where nothing has samples, or one image without a batch
        return pulled_back(g, (i,), TRANSPOSED[n - 1], y, x, w, b, stride, padding, output_padding, groups, dilation)
    stride, padding, dilation = settings(w, b, stride, padding, dilation)
    found = _FORTH[x.dim()](g.reshape(-1, *y.shape[1:]), w, None, stride, padding, dilation, groups)
    return found.reshape(*lead, *x.shape)


@adjoint(*TRANSPOSED, per_sample=True)
def transposed_convolution_per_sample(
    g: Tensor,
    i: int,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """`M_k = Σ_t x_t p_ktᵀ` with the patch `p_kt` of sensitivities that each position adds to."""
    if i == 2:
        return g.flatten(3).sum(3)
    k, batch = g.shape[:2]
    found = patches(g.flatten(0, 1), w, *settings(w, b, stride, padding, dilation))  # [K B, C, kernel, T]
    split = found.reshape(k, batch, groups, -1, found.shape[-1])
    return (x.reshape(batch, groups, w.shape[0] // groups, -1) @ split.mT).reshape(k, batch, *w.shape)


@adjoint(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def adaptive_average(g: Tensor, i: int, y: Tensor, x: Tensor, size: Any) -> Tensor:
    """Every entry of a window gets its share, where windows divide the input evenly."""
    dims = range(-len(size), 0)
    if any(x.shape[d] % y.shape[d] for d in dims):
        op = aten.adaptive_avg_pool1d.default if len(size) == 1 else aten.adaptive_avg_pool2d.default
        return pulled_back(g, (0,), op, y, x, size)
    for d in dims:
        repeat = x.shape[d] // y.shape[d]
        g = (g / repeat).repeat_interleave(repeat, d)
    return g


@adjoint(aten.max_pool2d.default)
def max_pool(
    g: Tensor,
    i: int,
    y: Tensor,
    x: Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Everything goes to the entry that was the largest of its window."""
    _, places = F.max_pool2d(x, kernel, stride or None, padding, dilation, ceil_mode, return_indices=True)
    lead = g.shape[: g.dim() - y.dim()]
    zeros = g.new_zeros(*lead, *x.shape[:-2], x.shape[-2] * x.shape[-1])
    rows = g.flatten(-2)
    return zeros.scatter_add(-1, places.flatten(-2).expand_as(rows), rows).reshape(*lead, *x.shape)


@adjoint(aten.avg_pool2d.default)
def average_pool(
    g: Tensor,
    i: int,
    y: Tensor,
    x: Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """A convolution with equal weights where every window counts the same; else by automatic differentiation."""
    kernel, padding = _each(kernel, 2), _each(padding, 2)
    stride = _each(stride, 2) if stride else kernel
    if ceil_mode or (any(padding) and not count_include_pad and divisor_override is None):
        rest = (kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return pulled_back(g, (0,), aten.avg_pool2d.default, y, x, *rest)
    weight = g.new_full((1, 1, *kernel), 1 / (divisor_override or kernel[0] * kernel[1]))
    extra = [
        x.shape[-2 + d] - ((y.shape[-2 + d] - 1) * stride[d] - 2 * padding[d] + kernel[d]) for d in range(2)
    ]  # what the last window left out
    folded = g.reshape(-1, 1, *y.shape[-2:])
    found = F.conv_transpose2d(folded, weight, None, stride, padding, extra)
    return found.reshape(*g.shape[:-2], *x.shape[-2:])
