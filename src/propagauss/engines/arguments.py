"""What both engines ask of their arguments."""

from __future__ import annotations

from typing import Any

from torch import nn

from propagauss.errors import InputError
from propagauss.posteriors.base import Posterior


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


def bound(engine: str, model: nn.Module, posterior: Posterior | None) -> Posterior | None:
    """The posterior with the shapes of the model's parameters."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{engine} needs an nn.Module, got {type(model).__name__}")
    if posterior is None:
        return None
    if not isinstance(posterior, Posterior):
        raise InputError(
            f"the posterior is a {type(posterior).__name__}: give a DiagonalPosterior, KroneckerPosterior or "
            "FullPosterior"
        )
    return posterior.bind({name: p.detach() for name, p in model.named_parameters()})
