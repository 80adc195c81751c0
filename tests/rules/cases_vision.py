"""Cases of the contract for feature maps: convolution with fixed weights, pooling, resampling, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rules.cases import Case

MAP = ((1, 2, 3),)  # small: the literal loops are slow
TALL = ((1, 5, 1),)
ROW = ((1, 4),)
CUBE = ((1, 1, 2, 2),)
PAIR = torch.tensor([0.7, -1.3], dtype=torch.float64)


def kernel(*shape: int) -> Tensor:
    return torch.linspace(-1, 1.2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def _fixed(op: Callable[..., Tensor], *shape: int, **settings: Any) -> Callable[[Tensor], Tensor]:
    """A convolution with a weight of the given shape."""
    weight = kernel(*shape)
    return lambda x: op(x, weight, **settings)


_PLAIN = {"bias": None, "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "transposed": False, "groups": 1}
_UNEVEN = {"stride": 2, "padding": 1, "output_padding": (1, 0), "groups": 2, "dilation": (1, 2)}
CONVOLUTION = [
    Case("conv2d", _fixed(F.conv2d, 2, 1, 2, 2, bias=PAIR), MAP, exact=True),
    Case("conv2d strided", _fixed(F.conv2d, 1, 1, 2, 2, stride=2, padding=1), MAP, exact=True),
    Case("conv2d same", _fixed(F.conv2d, 1, 1, 3, 1, padding="same"), MAP, exact=True),
    Case("conv2d same, even kernel", _fixed(F.conv2d, 1, 1, 2, 2, padding="same"), ((1, 2, 2),), exact=True),
    Case("conv2d in groups", _fixed(F.conv2d, 2, 2, 1, 2, groups=2), ((4, 1, 2),), exact=True),
    Case("conv2d by depth", _fixed(F.conv2d, 4, 1, 2, 1, groups=2), ((2, 3, 1),), exact=True),
    Case("conv2d with a weight that is computed", lambda x: F.conv2d(x, kernel(2, 1, 2, 2), PAIR), MAP, exact=True),
    Case("conv1d", _fixed(F.conv1d, 2, 2, 2, bias=PAIR, padding="valid"), ((2, 3),), exact=True),
    Case("conv3d", _fixed(F.conv3d, 2, 1, 1, 2, 1, bias=PAIR), CUBE, exact=True),
    Case("transposed conv1d", _fixed(F.conv_transpose1d, 2, 1, 3, stride=2), ((2, 2),), exact=True),
    Case("transposed conv2d", _fixed(F.conv_transpose2d, 1, 2, 2, 1, bias=PAIR), ((1, 2, 1),), exact=True),
    Case("transposed conv2d in groups", _fixed(F.conv_transpose2d, 2, 1, 3, 2, **_UNEVEN), ((2, 1, 2),), exact=True),
    Case("transposed conv3d", _fixed(F.conv_transpose3d, 1, 1, 1, 2, 1, stride=2), ((1, 1, 2, 1),), exact=True),
    Case("convolution", _fixed(torch.convolution, 2, 1, 2, 2, **_PLAIN, output_padding=[0, 0]), MAP, exact=True),
]

AVERAGES = [
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), ROW, exact=True),
    Case("avg_pool1d at the edges", lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), ROW, exact=True),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, (1, 2), 1), MAP, exact=True),
    Case("avg_pool2d without padding", lambda x: F.avg_pool2d(x, 2, 2, 1, False, False), MAP, exact=True),
    Case("avg_pool2d ceil and padded", lambda x: F.avg_pool2d(x, 2, 2, 1, True), MAP, exact=True),
    Case("avg_pool2d divisor", lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3), MAP, exact=True),
    Case("avg_pool3d ceil", lambda x: F.avg_pool3d(x, (1, 2, 2), 1, (0, 1, 1), True, False), CUBE, exact=True),
    Case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), ROW, exact=True),
    Case("adaptive_avg_pool2d uneven", lambda x: F.adaptive_avg_pool2d(x, (3, None)), TALL, exact=True),
    Case("adaptive_avg_pool2d to more", lambda x: F.adaptive_avg_pool2d(x, (3, 3)), ((1, 2, 2),), exact=True),
    Case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (1, 2, 1)), ((1, 2, 3, 1),), exact=True),
    Case("global average", lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), ((2, 2, 2),), exact=True),
    Case("lp_pool2d", lambda x: F.lp_pool2d(x, 2.0, 2, 1), MAP, positive=True, structures=("full",)),
]

MAXIMA = [
    Case("max_pool1d", lambda x: F.max_pool1d(x, 2, 1), ROW),
    Case("max_pool2d", lambda x: F.max_pool2d(x, 2, 1, 1, 2, True), ((1, 2, 2),)),
    Case("max_pool2d with indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], MAP),
    Case("max_pool3d", lambda x: F.max_pool3d(x, (1, 2, 2), 1), CUBE),
    Case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 3), ROW),
    Case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (2, 1), return_indices=True)[0], MAP),
    Case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, (1, 2, 1)), ((1, 2, 3, 1),)),
    Case("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), ((1, 2, 4),)),
]


def _resize(mode: str, **settings: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, mode=mode, **settings)


RESAMPLING = [
    Case("nearest", _resize("nearest", scale_factor=2), ((1, 1, 2),), exact=True),
    Case("nearest of cubes", _resize("nearest", size=(1, 2, 3)), CUBE, exact=True),
    Case("nearest-exact", _resize("nearest-exact", size=(3, 2)), MAP, exact=True),
    Case("linear scaled", _resize("linear", scale_factor=1.7), ((1, 3),), exact=True),
    Case("bilinear", _resize("bilinear", scale_factor=(2, 1.6)), ((1, 1, 2),), exact=True),
    Case("bilinear by the corners", _resize("bilinear", size=(3, 2), align_corners=True), MAP, exact=True),
    Case("bilinear without aliases", _resize("bilinear", size=(1, 3), antialias=True), ((1, 1, 5),), exact=True),
    Case("bicubic", _resize("bicubic", size=(3, 2)), MAP, exact=True),
    Case("bicubic without aliases", _resize("bicubic", size=(1, 2), antialias=True), MAP, exact=True),
    Case("trilinear", _resize("trilinear", size=(1, 2, 3)), CUBE, exact=True),
]

MOVES = [
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), ((4, 1, 1),), exact=True),
    Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), ((1, 2, 4),), exact=True),
    Case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), ((4, 1, 2),), exact=True),
    Case("unfold", lambda x: F.unfold(x, (2, 1), padding=(0, 1)), ((1, 3, 1),), exact=True),
    Case("fold", lambda x: F.fold(x, (3, 1), (2, 1)), ((2, 2),), exact=True),
    Case("reflect", lambda x: F.pad(x, (1, 0, 0, 1), mode="reflect"), ((1, 2, 2),), exact=True),
    Case("replicate", lambda x: F.pad(x, (1, 0, 0, 1), mode="replicate"), ((1, 1, 2),), exact=True),
    Case("reflection_pad2d", lambda x: torch.ops.aten.reflection_pad2d(x, [1, 0, 0, 1]), ((1, 2, 2),), exact=True),
    Case("replication_pad1d", lambda x: torch.ops.aten.replication_pad1d(x, [1, 2]), ((2, 2),), exact=True),
]


def _held(groups: int, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0):
    """Group normalisation with the statistics of given means."""

    def at(means: list[Tensor]):
        rows = means[0].reshape(1, groups, -1)
        centre, stddev = rows.mean(-1, keepdim=True), (rows.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return lambda x: ((x.reshape(-1, groups, rows.shape[2]) - centre) / stddev).reshape(x.shape) * scale + shift

    return at


FOUR = torch.cat([PAIR, -PAIR])
NORMS = [
    ("group_norm", lambda x: F.group_norm(x, 2, FOUR), ((4, 2),), _held(2, FOUR.reshape(4, 1))),
    ("group_norm of a map", lambda x: F.group_norm(x, 1, None, PAIR), ((2, 1, 2),), _held(1, 1.0, PAIR.view(2, 1, 1))),
    ("instance_norm", lambda x: F.instance_norm(x, None, None, PAIR), ((2, 3),), _held(2, PAIR.reshape(2, 1))),
]
STATISTICS = [
    *(Case(n, f, e, structures=("full",)) for n, f, e, _ in NORMS),
    *(Case(f"{n}, held", f, e, exact=True, structures=("diagonal",), held=h) for n, f, e, h in NORMS),
    Case(
        "group_norm, jacobian",
        NORMS[0][1],
        NORMS[0][2],
        structures=("diagonal",),
        options={"normalisation": "jacobian"},
    ),
    Case(
        "instance_norm with statistics",
        lambda x: F.instance_norm(x, PAIR, PAIR.square(), PAIR, -PAIR, use_input_stats=False),
        ((2, 2),),
        exact=True,
    ),
]

VISION = [*CONVOLUTION, *AVERAGES, *MAXIMA, *RESAMPLING, *MOVES, *STATISTICS]
