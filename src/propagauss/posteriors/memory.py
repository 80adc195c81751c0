"""Refusing what does not fit, before the machine starts to swap."""

from __future__ import annotations

import os

import torch

from propagauss.errors import InputError


def require_memory(needed: int, what: str, device: torch.device) -> None:
    """Raise unless the device has `needed` bytes; says nothing where the size of the memory is not known."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > available:
        raise InputError(
            f"{what} needs about {needed / 1e9:.3g} GB and the machine has {available / 1e9:.3g} GB: use "
            "structure='kronecker' or 'diagonal', or fewer parameters, such as those of the last layer"
        )
