"""What comes in from outside: models and how they are called, what a loader yields, which labels and targets fit."""

from propagauss.inputs.calls import (
    arguments,
    as_call,
    as_latent,
    as_model,
    as_net,
    as_tensor,
    call,
    check_eval,
    check_labels,
    check_some_labels,
    check_targets,
    device_of,
    dtype_of,
    explained,
)
from propagauss.inputs.loaders import Takes, batches, input_batches, taken_by

__all__ = [
    "Takes",
    "arguments",
    "as_call",
    "as_latent",
    "as_model",
    "as_net",
    "as_tensor",
    "batches",
    "call",
    "check_eval",
    "check_labels",
    "check_some_labels",
    "check_targets",
    "device_of",
    "dtype_of",
    "explained",
    "input_batches",
    "taken_by",
]
