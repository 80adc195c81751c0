"""Whether an exported model can be streamlined at all: evaluation mode, and inputs of the right kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from propagauss.errors import InputError
from propagauss.graph import module_path, op_name

aten = torch.ops.aten

_TRAINING_FLAG = {
    "aten::dropout": 2,
    "aten::feature_dropout": 2,
    "aten::alpha_dropout": 2,
    "aten::feature_alpha_dropout": 2,
    "aten::batch_norm": 5,
    "aten::rrelu": 3,
}


_TRAINING_OPS = {
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_functional",
    "aten::native_dropout",
    "aten::rrelu_with_noise",
}
_NO_STATISTICS = {aten._native_batch_norm_legit.no_stats}


def refuse_training(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        at = _TRAINING_FLAG.get(name)
        active = at is not None and len(node.args) > at and bool(node.args[at])
        if "dropout" in name and active:
            active = node.args[1] > 0
        if ("batch_norm" in name and active and node.args[3] is None) or node.target in _NO_STATISTICS:
            raise InputError(
                f"{op_name(node.target)} at '{module_path(node)}' has no running statistics and normalises by those of "
                "the batch, so its samples are not independent: train with track_running_stats=True"
            )
        if active or name in _TRAINING_OPS:
            raise InputError(
                f"{op_name(node.target)} at '{module_path(node)}' is in training mode, where the output is random or "
                "changes the model: call model.eval() first"
            )


def check_dtypes(model: nn.Module, leaves: list[Any]) -> None:
    """Tracing does not notice when the input and the weights have different precisions."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and len(kinds) == 1 and leaf.dtype not in kinds:
            raise InputError(
                f"input {i} of the example is {leaf.dtype}, the model {kinds.pop()}: convert one with .to()"
            )


def check_integers(graph: fx.Graph) -> None:
    """Tracing does not notice either when integers go where weights are multiplied."""
    for node in graph.nodes:
        if node.target in (aten.linear.default, aten.addmm.default, aten.conv2d.default):
            x: Any = node.args[1] if node.target == aten.addmm.default else node.args[0]
            if not x.meta["val"].is_floating_point():
                raise InputError(
                    f"the example is {x.meta['val'].dtype} where {op_name(node.target)} at '{module_path(node)}' "
                    "multiplies it with weights: convert it to the dtype of the model"
                )
