"""Indexing by a boolean mask that is a constant: its size depends on values, but on known ones.

`h[:, mask]` becomes `h[:, indices]` with the indices worked out now; all sizes after it are then known.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from propagauss.graph import evaluate, is_assertion, nodes_in

aten = torch.ops.aten


def fix_masks(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Replace, in place, what depends on the values of constants only and decides a size; adds to `constants`."""
    if not any(_is_open_ended(n) for n in graph.nodes):
        return
    known: dict[fx.Node, Any] = {n: constants[n.name] for n in graph.nodes if n.name in constants}
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target == aten.nonzero.default and node.args[0] in known:
            indices = _added(graph, constants, node, known[node.args[0]].nonzero())
            known[indices] = constants[indices.name]
            node.replace_all_uses_with(indices)
            graph.erase_node(node)
            changed = True
            continue
        if node.target == aten.index.Tensor and _is_masked(node, known):
            node.args = (node.args[0], _indices(graph, constants, node, known))
            changed = True
        elif _is_known(node, known):
            known[node] = _value(node, known)
        if changed:
            _refresh(node)


def _is_open_ended(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and bool(free_unbacked_symbols(value))


def _is_known(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    """Whether an op can be worked out: constants only, nothing random."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) and op is not operator.getitem:
        return False
    if isinstance(op, torch._ops.OpOverload) and (
        op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags
    ):
        return False
    return not is_assertion(op) and all(a in known for a in node.all_input_nodes) and not _is_float(node)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    op: Any = node.target
    args: Any = map_arg((node.args, node.kwargs), lambda a: known[a])
    return op(*args[0], **args[1])


def _is_masked(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    """Whether there are boolean indices, all of them known."""
    masks = [n for n in nodes_in(node.args[1]) if n.meta["val"].dtype in (torch.bool, torch.uint8)]
    return bool(masks) and all(n in known for n in masks)


def _indices(
    graph: fx.Graph, constants: dict[str, Tensor], node: fx.Node, known: dict[fx.Node, Any]
) -> list[fx.Node | None]:
    """A mask of `k` dimensions stands for `k` vectors of indices, as PyTorch itself takes it."""
    found: list[fx.Node | None] = []
    given: Any = node.args[1]
    for index in given:
        if index is not None and index in known and known[index].dtype in (torch.bool, torch.uint8):
            found.extend(_added(graph, constants, node, part) for part in known[index].nonzero().unbind(-1))
        else:
            found.append(index)
    return found


def _added(graph: fx.Graph, constants: dict[str, Tensor], like: fx.Node, value: Tensor) -> fx.Node:
    """A new constant of the graph."""
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        node = graph.placeholder(f"fixed_mask_{len(constants)}")
    fake: Any = next(v for v in _fakes(like) if hasattr(v, "fake_mode"))
    node.meta["val"] = fake.fake_mode.from_tensor(value, static_shapes=True)
    constants[node.name] = value
    return node


def _fakes(node: fx.Node) -> list[Any]:
    return [node.meta.get("val"), *(a.meta.get("val") for a in node.all_input_nodes)]


def _refresh(node: fx.Node) -> None:
    """Sizes that were open before are known now."""
    if not is_assertion(node.target):
        evaluate(node)
