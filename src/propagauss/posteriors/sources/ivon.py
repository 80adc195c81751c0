"""Posteriors trained with ivon-opt's IVON optimiser, read without importing it (its licence is the GPL)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from propagauss.errors import PosteriorError
from propagauss.inputs import as_model
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.fingerprint import fingerprint


def from_ivon(optimizer: Any, model: nn.Module) -> Posterior:
    """`variance = 1 / (ess (hess + weight_decay))`, group by group.

    The mean is the model's own parameters, as always. Inside `optimizer.sampled_params()` those are a sample: variances
    read there are right, but leave it before you streamline the model.

    Args:
        optimizer: an IVON optimiser.
        model: the model that it trains; parameters without a group are deterministic.

    Returns:
        A posterior whose `details` hold `prior_precision`, `ess * weight_decay`, if it is the same for all groups.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups or not all({"hess", "ess", "weight_decay"} <= set(g) for g in groups):
        raise PosteriorError(
            f"from_ivon reads the IVON optimiser of ivon-opt, whose groups hold hess, ess and weight_decay; "
            f"got {type(optimizer).__name__}"
        )
    model = as_model(model)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {id(p): v for group in groups for p, v in _variances(group)}
    variances = {name: found[key] for key, name in names.items() if key in found}
    if not variances:
        raise PosteriorError(
            "the optimiser trains none of the model's parameters: pass the very model it was made for, not a copy"
        )
    posterior = DiagonalPosterior(variances).bind(dict(model.named_parameters()))
    precisions = {float(g["ess"]) * float(g["weight_decay"]) for g in groups}
    posterior.fitted_on = fingerprint(dict(model.named_parameters()))
    posterior.details = {"prior_precision": precisions.pop()} if len(precisions) == 1 else {}
    return posterior


def _variances(group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a parameter and its variance; `hess` is flat, in the order of the group's parameters."""
    parameters = [p for p in group["params"] if p is not None]
    sizes = [p.numel() for p in parameters]
    hess: Tensor = group["hess"]
    if hess.numel() != sum(sizes):
        raise PosteriorError(
            f"IVON holds {hess.numel()} Hessian entries for parameters of {sum(sizes)}: the parameters have changed "
            "since the optimiser was made"
        )
    flat = 1 / (group["ess"] * (hess.detach() + group["weight_decay"]))
    parts = flat.split(sizes)
    return [(p, v.reshape(p.shape).to(p.device, p.dtype)) for p, v in zip(parameters, parts, strict=True)]
