"""Which weights a posterior was fitted on: a checksum for each parameter of the model.

A posterior is a covariance around these weights, and means nothing around others. Numbers are compared in single
precision, so that a model and its posterior may be converted to double precision; weights that are then kept in fewer
bits are other weights, and not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def checksum(t: Tensor) -> str:
    """Of its type, its shape and its bytes."""
    content = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
    digest.update(content.numpy().data)
    return digest.hexdigest()[:16]


def fingerprint(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """By name, for parameters in single or double precision."""
    wide = {name: p for name, p in parameters.items() if p.dtype in (torch.float32, torch.float64)}
    return {name: checksum(p.detach().to(torch.float32)) for name, p in wide.items()}


def differing(fitted_on: Mapping[str, str], parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that are not as they were."""
    known = {name: p for name, p in parameters.items() if name in fitted_on}
    return [name for name, found in fingerprint(known).items() if found != fitted_on[name]]
