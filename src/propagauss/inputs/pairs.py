"""A mean and the logarithm of a variance that a model returns apart: as a pair, or in fields that say what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian

MEANS = ("mean", "mu", "loc")
LOG_VARIANCES = ("log_variance", "log_var", "logvar")


def joined(output: Any) -> Any:
    """Mean and log variance as one, in the last dimension: `[B]` or `[B, 1]` each -> `[B, 2]`, `[B, k]` -> `[B, k, 2]`.

    They are tensors or, from a network, Gaussians, of which the variances are kept. A single output is returned as it
    is.
    """
    pair = _pair(output)
    if pair is None:
        return output
    mean, log_variance = pair
    if mean.shape != log_variance.shape:
        raise InputError(
            f"the model returned a mean {tuple(mean.shape)} and a log variance {tuple(log_variance.shape)}: they must "
            "have one shape, so expand the smaller one"
        )
    if isinstance(mean, Tensor):
        return _beside(mean, log_variance)
    return Gaussian.diagonal(_beside(mean.mean, log_variance.mean), _beside(mean.variance, log_variance.variance))


def _beside(one: Tensor, other: Tensor) -> Tensor:
    alone = one.dim() > 1 and one.shape[-1] == 1
    return torch.cat([one, other], -1) if alone else torch.stack([one, other], -1)


def _pair(output: Any) -> tuple[Any, Any] | None:
    """The two, of a kind; None if the output is something else."""
    if isinstance(output, Mapping):  # a dictionary, or what Hugging Face returns
        return _named(dict(output))
    if hasattr(output, "_asdict"):
        return _named(output._asdict())
    if isinstance(output, (tuple, list)) and len(output) == 2 and _alike(*output):
        return output[0], output[1]
    return None


def _named(fields: dict[str, Any]) -> tuple[Any, Any] | None:
    """By their names alone: in another order, or with a variance in place of its logarithm, all would be wrong."""
    found = [next((fields[n] for n in names if n in fields), None) for names in (MEANS, LOG_VARIANCES)]
    if _alike(*found):
        return found[0], found[1]
    if len(fields) < 2:
        return None
    raise InputError(
        f"the model returned the fields {', '.join(map(str, fields))}; a mean and the logarithm of the variance are "
        f"needed: call them '{MEANS[0]}' and '{LOG_VARIANCES[0]}'"
    )


def _alike(one: Any, other: Any) -> bool:
    return any(isinstance(one, kind) and isinstance(other, kind) for kind in (Tensor, Gaussian))
