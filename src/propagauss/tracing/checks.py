"""Whether an exported model can be streamlined at all: evaluation mode, and inputs of the right kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor

from propagauss.errors import InputError, UnsupportedOpError, kept_norm
from propagauss.nodes import argument, module_path, nodes_in, op_name
from propagauss.rules.facts import facts

aten = torch.ops.aten

_RECURRENT = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}
_NO_STATISTICS = {aten._native_batch_norm_legit.no_stats}


def refuse_training(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        active = _is_training(node, name)
        no_statistics = "batch_norm" in name and active and argument(node, 3, "running_mean") is None
        if no_statistics or node.target in _NO_STATISTICS:
            raise InputError(
                f"{op_name(node.target)} at '{module_path(node)}' has no running statistics and normalises by those of "
                "the batch, so its samples are not independent: train with track_running_stats=True"
            )
        if active or facts(node.target).training_only:
            raise InputError(
                f"{op_name(node.target)} at '{module_path(node)}' is in training mode, where the output is random or "
                "changes the model: call model.eval() first"
            )


def refuse_parts_of_its_own(graph: fx.Graph, constants: Mapping[str, Any]) -> None:
    """What tracing does not write out: branches and bodies of loops, and derivatives that a model takes itself."""
    for node in graph.nodes:
        if op_name(node.target) == "_add_batch_dim":
            raise UnsupportedOpError(f"torch.vmap at '{module_path(node)}' is not followed: write it with plain ops")
        has_graphs = any(a.op == "get_attr" for a in nodes_in(node.args))
        if has_graphs and isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UnsupportedOpError(
                f"{op_name(node.target)} at '{module_path(node)}' has branches or a body of its own, which are not "
                "followed: write it with torch.where, or as a plain loop"
            )
    if any(isinstance(value, FakeTensor) for value in constants.values()):
        raise UnsupportedOpError(
            "the model takes a derivative itself, as with torch.func.grad, whose steps tracing does not write out: "
            "write the derivative with plain ops"
        )


def refuse_kept_norms(graph: fx.Graph, parameters: Mapping[str, str], random: Collection[str]) -> None:
    """A table of embeddings that is changed whenever it is read has no mean to be uncertain about."""
    for node in graph.nodes:
        if node.target == aten.embedding_renorm.default and isinstance(node.args[0], fx.Node):
            name = parameters.get(node.args[0].name)
            if name is not None and name in random:
                raise UnsupportedOpError(f"{op_name(node.target)} at '{module_path(node)}': {kept_norm(name)}")


def _is_training(node: fx.Node, name: str) -> bool:
    """Whether an op is told to be random, or to use the statistics of the batch."""
    if name in _RECURRENT:  # dropout between layers
        return (
            argument(node, 4, "num_layers") != 1
            and bool(argument(node, 6, "train"))
            and _positive(argument(node, 5, "dropout"))
        )
    known = facts(node.target)
    if known.training_flag is None:
        return False
    return bool(argument(node, *known.training_flag)) and (not known.drops_out or _positive(argument(node, 1, "p")))


def _positive(p: Any) -> bool:
    return not isinstance(p, (int, float)) or p > 0


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
            at, name = (1, "mat1") if node.target == aten.addmm.default else (0, "input")
            x: Any = argument(node, at, name)
            value = x.meta.get("val") if isinstance(x, fx.Node) else x
            if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
                raise InputError(
                    f"the example is {value.dtype} where {op_name(node.target)} at '{module_path(node)}' "
                    "multiplies it with weights: convert it to the dtype of the model"
                )
