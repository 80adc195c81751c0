"""What a Laplace fit asks of a likelihood: the loss of a batch, and a root of its Hessian in the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.errors import InputError


class Terms(NamedTuple):
    """What the likelihood says about one batch, at unit noise."""

    output: Tensor  # [B, C], with its graph
    loss: float  # negative log-likelihood without its constant
    targets: int  # number of target values, 0 for classification
    column: Callable[[int], Tensor]  # c -> [B, C], column c of a root of the Hessian of the loss in the outputs


def _classification(output: Tensor, y: Tensor, where: str) -> Terms:
    """Cross-entropy; its Hessian `diag(p) - p pᵀ` has a root with columns `√p_c (e_c - p)`."""
    if output.dim() != 2 or output.shape[1] < 2:
        raise InputError(
            f"{where}: classification needs outputs [B, C] with at least 2 classes, got {tuple(output.shape)}"
            + ("; give a binary model two logits" if output.shape[-1] == 1 else "")
        )
    if y.is_floating_point() or y.dtype == torch.bool:
        raise InputError(f"{where}: labels must be integers, the index of the class; got {y.dtype}")
    if y.shape != output.shape[:1]:
        raise InputError(
            f"{where}: labels have shape {tuple(y.shape)}, outputs {tuple(output.shape)}; labels must be [B]"
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= output.shape[1]:
        raise InputError(
            f"{where}: labels go from {low} to {high}, but the model has classes 0 to {output.shape[1] - 1}"
        )
    loss = F.cross_entropy(output.detach().double(), y.long(), reduction="sum").item()
    p = output.detach().softmax(1)
    return Terms(output, loss, 0, lambda c: p[:, c : c + 1].sqrt() * (_unit(p, c) - p))


def _regression(output: Tensor, y: Tensor, where: str) -> Terms:
    """Half the sum of squares; its Hessian is the identity."""
    fits = y.shape == output.shape or y.shape == (*output.shape, 1) or (*y.shape, 1) == output.shape
    if not fits or output.dim() == 0:
        raise InputError(
            f"{where}: targets have shape {tuple(y.shape)}, outputs {tuple(output.shape)}; they must agree"
        )
    output = output.reshape(len(y), -1)
    loss = 0.5 * (output.detach().double() - y.reshape(output.shape)).square().sum().item()
    return Terms(output, loss, y.numel(), lambda c: _unit(output, c))


def _unit(like: Tensor, c: int) -> Tensor:
    unit = torch.zeros_like(like)
    unit[:, c] = 1
    return unit


Likelihood = Callable[[Tensor, Tensor, str], Terms]
LIKELIHOODS: dict[str, Likelihood] = {"classification": _classification, "regression": _regression}
