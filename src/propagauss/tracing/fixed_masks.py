"""Indexing by a boolean mask that is a constant: its size depends on values, but on known ones.

`h[:, mask]` becomes `h[:, indices]` with the indices worked out now; all sizes after it are then known.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from propagauss.nodes import evaluate, is_assertion, nodes_in

aten = torch.ops.aten


def fix_masks(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Replace, in place, what depends on the values of constants only and decides a size; adds to `constants`."""
    if any(n.target == aten.nonzero.default or _masks(n) for n in graph.nodes):
        Fixing(graph, constants).run()


class Fixing:
    """One walk over a graph. `known` are the nodes whose values depend on constants only."""

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor]):
        self.graph, self.constants = graph, constants
        self.known = {n for n in graph.nodes if n.name in constants}

    def run(self) -> None:
        changed = False
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target == aten.nonzero.default and node.args[0] in self.known:
                node.replace_all_uses_with(self._constant(node, self._value(node)))
                self.graph.erase_node(node)
                changed = True
                continue
            if _masks(node) and all(n in self.known for n in _masks(node)):
                given: Any = node.args[1]
                node.args = (node.args[0], [i for index in given for i in self._indices(node, index)])
                changed = True
            if self._is_known(node):
                self.known.add(node)
            if changed and not is_assertion(node.target):
                evaluate(node)  # sizes that were open before are known now

    def _indices(self, node: fx.Node, index: Any) -> list[Any]:
        """A mask of `k` dimensions stands for `k` vectors of indices, as PyTorch itself takes it."""
        if index not in _masks(node):
            return [index]
        return [self._constant(node, part) for part in self._value(index).nonzero().unbind(-1)]

    def _is_known(self, node: fx.Node) -> bool:
        """Whether the value of an op can be worked out: from constants only, nothing random."""
        op = node.target
        if isinstance(op, torch._ops.OpOverload):
            plain = not (op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags or is_assertion(op))
        else:
            plain = op is operator.getitem
        return plain and all(a in self.known for a in node.all_input_nodes)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.constants[node.name]
        op: Any = node.target
        args: Any = map_arg((node.args, node.kwargs), self._value)
        return op(*args[0], **args[1])

    def _constant(self, like: fx.Node, value: Tensor) -> fx.Node:
        """A new constant of the graph."""
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            node = self.graph.placeholder(f"fixed_mask_{len(self.constants)}")
        fakes: list[Any] = [like.meta.get("val"), *(a.meta.get("val") for a in like.all_input_nodes)]
        mode = next(v.fake_mode for v in fakes if hasattr(v, "fake_mode"))
        node.meta["val"] = mode.from_tensor(value, static_shapes=True)
        self.constants[node.name] = value
        self.known.add(node)
        return node


def _masks(node: fx.Node) -> list[fx.Node]:
    """The boolean indices of an op that indexes."""
    if node.target != aten.index.Tensor:
        return []
    return [n for n in nodes_in(node.args[1]) if n.meta["val"].dtype in (torch.bool, torch.uint8)]
