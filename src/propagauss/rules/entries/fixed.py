"""Ops that read no number of an argument, only its shape, type or device: certain whatever the argument.

`zeros_like(x)` is zero for every `x`. `copy` and `fill` keep the shape of their first argument and the numbers of their
second one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.matrices.products import stretched
from propagauss.rules.registry import MEAN_ONLY, rule

aten = torch.ops.aten

# empty tensors hold no number at all: what a model writes into them later is what counts
SHAPE_ONLY = [
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.fill.Scalar,
    aten.zero.default,
]
for _op in SHAPE_ONLY:
    MEAN_ONLY[_op] = (0,)
# steps: flat almost everywhere, so that the mean decides
MEAN_ONLY[aten.floor_divide.default] = MEAN_ONLY[aten.floor_divide.Scalar] = (0, 1)
MEAN_ONLY[aten.copy.default] = MEAN_ONLY[aten.fill.Tensor] = (0,)


@rule(aten.copy.default, aten.fill.Tensor, note="exact")
def copy(to: Gaussian | Tensor, source: Gaussian, non_blocking: bool = False) -> Gaussian:
    """The numbers of `source`, in the shape and the type of `to`."""
    like = mean_of(to)
    return stretched(source.to(dtype=like.dtype), like.shape)
