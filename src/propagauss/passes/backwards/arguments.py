"""Questions about an op and its arguments that the backward walk asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from propagauss.nodes import is_complex, nodes_in
from propagauss.rules.facts import facts

aten = torch.ops.aten


def has_derivative(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def has_complex(node: fx.Node) -> bool:
    return is_complex(node) or any(is_complex(a) for a in node.all_input_nodes)


def is_several(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (tuple, list))


def value_type(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    return value[0].dtype if isinstance(value, (tuple, list)) else value.dtype


def unread(node: fx.Node) -> tuple[int, ...]:
    """Arguments whose shape or type alone is read; attention reads all of its own."""
    return () if node.target == aten.scaled_dot_product_attention.default else facts(node.target).at_mean


def read(node: fx.Node) -> list[fx.Node]:
    """The arguments whose entries count."""
    positional = [arg for i, arg in enumerate(node.args) if i not in unread(node)]
    return [*nodes_in(positional), *nodes_in(node.kwargs)]


def paths(node: fx.Node) -> list[tuple[tuple[int, ...], fx.Node]]:
    """Where the arguments of an op are: positions, also inside lists."""
    found: list[tuple[tuple[int, ...], fx.Node]] = []
    for i, arg in enumerate(node.args):
        if i in unread(node):
            continue
        if isinstance(arg, fx.Node):
            found.append(((i,), arg))
        elif isinstance(arg, (list, tuple)):
            found.extend(((i, j), a) for j, a in enumerate(arg) if isinstance(a, fx.Node))
    return found
