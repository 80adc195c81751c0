"""What a fit says of chosen parameters that are not random, or about which it learnt nothing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from propagauss.errors import InputError


def report_deterministic(chosen: Sequence[str], fitted: Sequence[str]) -> None:
    """Parameters without Kronecker factors; raises if no others are left."""
    left = [n for n in chosen if n not in fitted]
    if not left:
        return
    reason = "Kronecker factors exist only for weights and biases of linear layers and convolutions; not for "
    if not fitted:
        raise InputError(f"{reason}{', '.join(left)}: use structure='diagonal' or 'full'")
    warnings.warn(
        f"{reason}{', '.join(left)}, which stay deterministic (structure='diagonal' and 'full' have no such limit)",
        stacklevel=3,
    )


def report_unlearnt(names: Sequence[str]) -> None:
    """Random parameters without curvature: both engines carry the variance of their prior, as they would any other."""
    if names:
        warnings.warn(
            f"the data say nothing about {', '.join(names)}: the curvature is exactly zero, as for parameters that are "
            "used behind torch.no_grad(), detach or .data only, or not at all, so the variance is that of the prior; "
            "leave them out with parameters=, or freeze them with requires_grad_(False)",
            stacklevel=3,
        )
