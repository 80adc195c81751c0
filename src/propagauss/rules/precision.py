"""Under `torch.autocast`, means take the low precision of the plain model; covariances stay in full precision.

Squares of half-precision numbers overflow from 256 on and lose what little is left below the mean's own rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_full_precision(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`; within `torch.autocast` without it, and with float32 for what has half precision."""
    first: Tensor = args[0]
    kind = "cpu" if first.is_cpu else first.device.type  # the former is quicker, which counts for a single sample
    if not torch.is_autocast_enabled(kind):
        return function(*args)
    with torch.autocast(kind, enabled=False):
        return function(*(widened(a) for a in args))


def widened(value: Any) -> Any:
    """A tensor in half precision as float32; anything else as it is."""
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def mean_in_norm(mean: Tensor) -> Tensor:
    """The mean as a normalisation layer takes it: autocast gives these float32."""
    return widened(mean) if torch.is_autocast_enabled(mean.device.type) else mean
