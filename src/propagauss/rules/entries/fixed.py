"""Ops that read no number of an argument, only its shape, type or device: certain whatever the argument.

`zeros_like(x)` is zero for every `x`. `copy` and `fill` keep the shape of their first argument and the numbers of their
second one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.elementwise.arithmetic import stretched
from propagauss.rules.facts import state
from propagauss.rules.registry import rule

aten = torch.ops.aten

# empty tensors hold no number at all: what a model writes into them later is what counts
state(
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
    at_mean=(0,),
)
# steps: flat almost everywhere, so that the mean decides
state(aten.floor_divide.default, aten.floor_divide.Scalar, at_mean=(0, 1))


@rule(aten.copy.default, aten.fill.Tensor, note="exact", at_mean=(0,))
def copy(to: Gaussian | Tensor, source: Gaussian, non_blocking: bool = False) -> Gaussian:
    """The numbers of `source`, in the shape and the type of `to`."""
    like = mean_of(to)
    return stretched(source.to(dtype=like.dtype), like.shape)
