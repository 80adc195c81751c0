"""What rules that sum over nodes share, in few ops: for small values, calls cost more than the numbers in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Found = tuple[Tensor, Tensor, Tensor | None]  # `E[g]`, `Var[g]` and the slope `Cov(x, g)/v`, unless it is not needed

BLOCK = 8192  # entries at once: values at nodes that stay in the cache are twice as fast


def in_blocks(rule: Callable[[Tensor, Tensor, bool], Found], m: Tensor, v: Tensor, slope: bool) -> Found:
    """The rule `(m, v, slope)`, for large values block by block."""
    if torch.compiler.is_compiling() or m.numel() <= BLOCK or v.shape != m.shape:
        return rule(m, v, slope)
    blocks = zip(m.flatten().split(BLOCK), v.flatten().split(BLOCK), strict=True)
    parts = zip(*(rule(*each, slope) for each in blocks), strict=True)
    mean, variance, *slopes = (torch.cat(each).view(m.shape) for each in parts if each[0] is not None)
    return mean, variance, slopes[0] if slopes else None


def raised(m: Tensor, v: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """The standard deviation, and what to multiply moments by.

    Below a floor, where the nodes would collapse onto the mean, moments are extrapolated linearly in `v`.

    Args:
        eps: the precision of the numbers, as a tensor: as a float it would take a call to make it one.
    """
    at = m.detach()
    floored = v.maximum(torch.addcmul(eps, at, at, value=torch.finfo(m.dtype).eps))
    return floored.sqrt(), v / floored


def moments(
    function: nn.Module, m: Tensor, scales: tuple[Tensor, Tensor], nodes: tuple[Tensor, Tensor], slope: bool
) -> Found:
    """Of a function, from `raised` scales, and nodes in standard deviations with their probabilities: `[K, *m.shape]`.

    Measured from the value at the mean, the shift of the mean is not large compared with the deviations.
    """
    (s, share), (z, mass) = scales, nodes
    evaluate = function.forward  # a call of the module costs as much as an op
    centre = evaluate(m)
    values = evaluate(torch.addcmul(m, s, z)) - centre
    once = mass * values
    shift, second = once.sum(0), (once * values).sum(0)
    variance = torch.addcmul(second, shift, shift, value=-1).relu()
    along = (once * z).sum(0) / s if slope else None
    return torch.addcmul(centre, share, shift), share * variance, along


def lifted(t: Tensor, m: Tensor) -> Tensor:
    """Numbers of nodes `[K, 1, 1]`, one for all entries of `m`: most values are `[batch, features]`."""
    return t if m.dim() == 2 else t.view(-1, *[1] * m.dim())
