"""Cases of the contract for feature maps: convolution with fixed weights, pooling, resampling, normalisation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from rules.cases import Case

MAP = ((1, 2, 3),)  # small: the literal loops are slow
TALL = ((1, 5, 1),)
ROW = ((2, 4),)
CUBE = ((1, 2, 2, 2),)
PAIR = torch.tensor([0.7, -1.3], dtype=torch.float64)


def kernel(*shape: int) -> Tensor:
    return torch.linspace(-1, 1.2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


CONVOLUTION = [
    Case("conv2d", lambda x: F.conv2d(x, kernel(2, 1, 2, 2), PAIR), MAP, exact=True),
    Case("conv2d strided", lambda x: F.conv2d(x, kernel(1, 1, 2, 2), stride=2, padding=1), MAP, exact=True),
    Case("conv2d dilated", lambda x: F.conv2d(x, kernel(2, 1, 2, 1), dilation=2), MAP, exact=True),
    Case("conv2d valid", lambda x: F.conv2d(x, kernel(1, 1, 2, 2), padding="valid"), MAP, exact=True),
    Case("conv2d same", lambda x: F.conv2d(x, kernel(1, 1, 3, 1), padding="same"), MAP, exact=True),
    Case("conv2d same, even kernel", lambda x: F.conv2d(x, kernel(1, 1, 2, 2), padding="same"), MAP, exact=True),
    Case("conv2d in groups", lambda x: F.conv2d(x, kernel(2, 2, 1, 2), groups=2), ((4, 1, 3),), exact=True),
    Case("conv2d by depth", lambda x: F.conv2d(x, kernel(4, 1, 2, 1), groups=2), ((2, 3, 1),), exact=True),
    Case("conv1d", lambda x: F.conv1d(x, kernel(2, 2, 3), PAIR), ROW, exact=True),
    Case("conv1d same", lambda x: F.conv1d(x, kernel(1, 2, 2), padding="same", dilation=3), ROW, exact=True),
    Case("conv3d", lambda x: F.conv3d(x, kernel(2, 1, 2, 1, 2), PAIR), CUBE, exact=True),
    Case("transposed conv1d", lambda x: F.conv_transpose1d(x, kernel(2, 1, 3), stride=2), ((2, 2),), exact=True),
    Case("transposed conv2d", lambda x: F.conv_transpose2d(x, kernel(1, 2, 2, 2), PAIR), ((1, 2, 2),), exact=True),
    Case(
        "transposed conv2d in groups",
        lambda x: F.conv_transpose2d(x, kernel(2, 1, 3, 2), None, 2, 1, (1, 0), groups=2, dilation=(1, 2)),
        ((2, 2, 2),),
        exact=True,
    ),
    Case("transposed conv3d", lambda x: F.conv_transpose3d(x, kernel(1, 1, 1, 2, 1)), CUBE, exact=True),
    Case("convolution", lambda x: torch.convolution(x, kernel(2, 1, 2, 2), None, *_PLAIN), MAP, exact=True),
]
_PLAIN = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)

AVERAGES = [
    Case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), ROW, exact=True),
    Case("avg_pool1d at the edges", lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), ROW, exact=True),
    Case("avg_pool2d", lambda x: F.avg_pool2d(x, (1, 2), 1), MAP, exact=True),
    Case("avg_pool2d padded", lambda x: F.avg_pool2d(x, 2, padding=1), MAP, exact=True),
    Case("avg_pool2d without padding", lambda x: F.avg_pool2d(x, 2, 2, 1, False, False), MAP, exact=True),
    Case("avg_pool2d ceil", lambda x: F.avg_pool2d(x, 2, ceil_mode=True), MAP, exact=True),
    Case("avg_pool2d ceil and padded", lambda x: F.avg_pool2d(x, 2, 2, 1, True), MAP, exact=True),
    Case("avg_pool2d divisor", lambda x: F.avg_pool2d(x, 2, 1, divisor_override=3), MAP, exact=True),
    Case("avg_pool3d", lambda x: F.avg_pool3d(x, (1, 2, 2)), CUBE, exact=True),
    Case("avg_pool3d ceil", lambda x: F.avg_pool3d(x, 2, 1, 1, True, False), ((1, 1, 2, 2),), exact=True),
    Case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), ROW, exact=True),
    Case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), MAP, exact=True),
    Case("adaptive_avg_pool2d uneven", lambda x: F.adaptive_avg_pool2d(x, (3, None)), TALL, exact=True),
    Case("adaptive_avg_pool2d to more", lambda x: F.adaptive_avg_pool2d(x, (3, 4)), ((1, 2, 2),), exact=True),
    Case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (1, 2, 1)), CUBE, exact=True),
    Case("global average", lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), ((2, 2, 2),), exact=True),
    Case("lp_pool2d", lambda x: F.lp_pool2d(x, 2.0, 2, 1), MAP, positive=True, structures=("full",)),
]

MAXIMA = [
    Case("max_pool1d", lambda x: F.max_pool1d(x, 2, 1), ROW),
    Case("max_pool2d", lambda x: F.max_pool2d(x, 2), MAP),
    Case("max_pool2d overlapping", lambda x: F.max_pool2d(x, 2, 1, 1), MAP),
    Case("max_pool2d dilated", lambda x: F.max_pool2d(x, 2, 1, 1, 2, True), MAP),
    Case("max_pool2d with indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], MAP),
    Case("max_pool3d", lambda x: F.max_pool3d(x, (1, 2, 2), 1), CUBE),
    Case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 3), ROW),
    Case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (2, 1), return_indices=True)[0], MAP),
    Case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, (1, 2, 1)), CUBE),
    Case("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), ((1, 4, 2),)),
]


def _resize(mode: str, **settings: object):
    return lambda x: F.interpolate(x, mode=mode, **settings)  # type: ignore[arg-type]


RESAMPLING = [
    Case("nearest", _resize("nearest", scale_factor=2), ((1, 2, 2),), exact=True),
    Case("nearest to fewer", _resize("nearest", size=(2, 3)), MAP, exact=True),
    Case("nearest of rows", _resize("nearest", scale_factor=1.5), ROW, exact=True),
    Case("nearest of cubes", _resize("nearest", size=(1, 2, 3)), CUBE, exact=True),
    Case("nearest-exact", _resize("nearest-exact", size=(4, 2)), MAP, exact=True),
    Case("linear", _resize("linear", scale_factor=1.7), ROW, exact=True),
    Case("linear recomputed", _resize("linear", scale_factor=1.7, recompute_scale_factor=True), ROW, exact=True),
    Case("bilinear", _resize("bilinear", scale_factor=(2, 1.3)), ((1, 2, 3),), exact=True),
    Case("bilinear to fewer", _resize("bilinear", size=(2, 2)), MAP, exact=True),
    Case("bilinear by the corners", _resize("bilinear", size=(4, 2), align_corners=True), MAP, exact=True),
    Case("bilinear without aliases", _resize("bilinear", size=(3, 1), antialias=True), TALL, exact=True),
    Case("bicubic", _resize("bicubic", size=(4, 2)), MAP, exact=True),
    Case("bicubic scaled", _resize("bicubic", scale_factor=1.5, align_corners=True), ((1, 2, 2),), exact=True),
    Case("bicubic without aliases", _resize("bicubic", size=(2, 2), antialias=True), MAP, exact=True),
    Case("trilinear", _resize("trilinear", size=(1, 2, 3)), CUBE, exact=True),
    Case("area", _resize("area", size=(2, 2)), MAP, exact=True),
]

MOVES = [
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), ((4, 1, 2),), exact=True),
    Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), ((1, 2, 4),), exact=True),
    Case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), ((4, 1, 2),), exact=True),
    Case("unfold", lambda x: F.unfold(x, (2, 1), padding=(0, 1)), ((1, 3, 1),), exact=True),
    Case("fold", lambda x: F.fold(x, (3, 2), (2, 1)), ((2, 4),), exact=True),
    Case("reflect", lambda x: F.pad(x, (1, 0, 0, 1), mode="reflect"), MAP, exact=True),
    Case("reflect rows", lambda x: F.pad(x, (1, 2), mode="reflect"), ROW, exact=True),
    Case("reflect cubes", lambda x: F.pad(x, (1, 0, 0, 0, 0, 0), mode="reflect"), CUBE, exact=True),
    Case("replicate", lambda x: F.pad(x, (1, 0, 0, 1), mode="replicate"), MAP, exact=True),
    Case("circular", lambda x: F.pad(x, (1, 0, 0, 1), mode="circular"), MAP, exact=True),
    Case("zeros around", lambda x: F.pad(x, (1, 0, 0, 1)), MAP, exact=True),
    Case("reflection_pad2d", lambda x: torch.ops.aten.reflection_pad2d(x, [1, 0, 0, 1]), MAP, exact=True),
    Case("replication_pad1d", lambda x: torch.ops.aten.replication_pad1d(x, [1, 2]), ROW, exact=True),
]

STATISTICS = [  # the diagonal structure keeps the scale term only: see test_convolution.py
    Case("group_norm", lambda x: F.group_norm(x, 2, torch.cat([PAIR, -PAIR])), ((4, 2),), structures=("full",)),
    Case("group_norm plain", lambda x: F.group_norm(x, 1), ((2, 1, 3),), structures=("full",)),
    Case("instance_norm", lambda x: F.instance_norm(x, None, None, PAIR, -PAIR), ROW, structures=("full",)),
    Case(
        "instance_norm with statistics",
        lambda x: F.instance_norm(x, PAIR, PAIR.square(), PAIR, -PAIR, use_input_stats=False),
        ROW,
        exact=True,
    ),
]

VISION = [*CONVOLUTION, *AVERAGES, *MAXIMA, *RESAMPLING, *MOVES, *STATISTICS]
