"""Ops that neither engine can follow, whatever their derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.rules.elementwise.activation import CLOSED
from propagauss.rules.facts import facts
from propagauss.rules.registry import BUILDERS, FUNCTIONS
from propagauss.tracing.trace import Traced

aten = torch.ops.aten
DRAWS = "draws random numbers, so that its result has no one mean"
_BY_MEMORY = (aten.as_strided.default, aten.as_strided_scatter.default, aten.as_strided_copy.default)


def refusal(node: fx.Node) -> str | None:
    """Why an op on an uncertain value cannot be followed, if so."""
    if node.target in _BY_MEMORY:
        return "reads or writes memory as it is laid out in the model, which is not how it is here"
    if getattr(node.target, "__module__", None) == "torch._functorch.predispatch":
        return "is a step of a derivative that the model takes itself (torch.func): write it with plain ops"
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return "returns a sparse tensor: leave it dense"
    known = node.target in FUNCTIONS or node.target in BUILDERS or node.target in CLOSED
    return DRAWS if _is_seeded(node) and not known else None


def draws(traced: Traced) -> Iterator[fx.Node]:
    """Ops that draw random numbers on which an output depends."""
    wanted = {n for n in traced.outputs if isinstance(n, fx.Node)}
    for node in reversed(traced.graph.nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
            if _is_seeded(node) and _takes_generator(node) and facts(node.target).training_flag is None:
                yield node


def _is_seeded(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _takes_generator(node: fx.Node) -> bool:
    """Not so what draws in training only, such as recurrent layers and attention."""
    packet: Any = node.target.overloadpacket  # type: ignore[union-attr]
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    return any(a.name == "generator" for schema in schemas for a in schema.arguments)
