"""What both engines ask of their arguments."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from torch import Tensor, nn

from propagauss.checks import kind, tensor
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_call, as_model
from propagauss.network.streamlined import Streamlined
from propagauss.posteriors.base import Posterior, as_posterior
from propagauss.posteriors.fingerprint import differing
from propagauss.tracing.trace import flatten


def as_source(model: Any) -> nn.Module:
    """The model to rewrite."""
    model = as_model(model)
    if isinstance(model, Streamlined) or isinstance(getattr(model, "net", None), Streamlined):
        raise InputError(f"the model is {kind(model)}, which is rewritten already: give the model it was made from")
    return model


def bound(model: nn.Module, posterior: Posterior | None) -> Posterior | None:
    """The posterior with the shapes of the model's parameters; a warning if it was fitted on others."""
    if posterior is None:
        return None
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = as_posterior(posterior).bind(parameters)
    other = differing(posterior.fitted_on, parameters)
    if other:
        listed = ", ".join(f"'{name}'" for name in other[:3]) + (f" and {len(other) - 3} more" if other[3:] else "")
        warnings.warn(
            f"the posterior was fitted on other weights: {listed} of the model have changed since, so that its "
            "covariance belongs to another network: load the weights it was fitted on, or fit it again",
            stacklevel=3,
        )
    return found


def fitted_noise(posterior: Posterior | None) -> float | None:
    """The noise of the observations that a posterior was fitted with."""
    return None if posterior is None else posterior.details.get("noise")


def check_example(example: Any, output: Any, sparse: bool) -> None:
    """Refuse what cannot be traced for what it is, rather than for where it fails."""
    if output is not None and not isinstance(output, str):
        raise InputError(f"output is {kind(output)}; the name of a field that the model returns is needed, or None")
    leaves = flatten(*as_call(example))[0]
    means = [leaf.mean if isinstance(leaf, Gaussian) else leaf for leaf in leaves]
    for i, leaf in enumerate(means):
        if isinstance(leaf, Tensor):
            tensor(leaf, f"input {i} of the example", sparse=sparse)
    if not any(isinstance(leaf, Tensor) for leaf in means):
        odd = kind(leaves[0] if len(leaves) == 1 else example)
        if any(isinstance(leaf, np.ndarray) for leaf in leaves):
            raise InputError(f"the example holds {odd}; tensors are needed: make them with torch.as_tensor")
        raise InputError(
            f"the example holds no tensor with a batch dimension, but {odd}: give an input that the model accepts, "
            "such as next(iter(loader))[0]"
        )
