"""Adjoints of convolutions by automatic differentiation, also where they are computed in parts or as plain products."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from propagauss.rules.adjoints import images


@pytest.mark.parametrize("block", [1, 10**6])
@pytest.mark.parametrize(
    ("size", "kernel", "stride"),
    [((9,), 1, [4]), ((7, 8), 1, [2, 3]), ((5, 4, 6), 1, [2, 1, 2]), ((7, 8), 3, [2, 1])],
    ids=["line", "image", "volume", "patches"],
)
def test_strided_convolutions(
    size: tuple[int, ...], kernel: int, stride: list[int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "BLOCK_ENTRIES", block)
    torch.manual_seed(0)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    x, w = torch.randn(2, 4, *size).double(), torch.randn(6, 2, *[kernel] * len(size)).double()
    y, pull, *_ = torch.func.vjp(lambda x: convolve(x, w, None, stride, kernel // 2, 1, 2), x)
    g = torch.randn(3, *y.shape).double()
    found = images.convolution(g, 0, y, x, w, None, stride, kernel // 2, 1, 2)
    torch.testing.assert_close(found, torch.stack([pull(row)[0] for row in g]))


@pytest.mark.parametrize("transposed", [False, True])
def test_one_image_without_a_batch(transposed: bool) -> None:
    """Its channels are samples, each with a kernel of its own."""
    convolve, op = (F.conv_transpose2d, images.transposed_convolution) if transposed else (F.conv2d, images.convolution)
    x, w = torch.randn(4, 5, 6).double(), torch.randn(4, 1, 2, 3).double()
    rest = (None, [1, 1], [0, 0], [0, 0], 4, [1, 1]) if transposed else (None, [1, 1], [0, 0], [1, 1], 4)
    y, pull, *_ = torch.func.vjp(lambda x: convolve(x, w, *rest), x)
    g = torch.randn(3, *y.shape).double()
    torch.testing.assert_close(op(g, 0, y, x, w, *rest), torch.stack([pull(row)[0] for row in g]))
