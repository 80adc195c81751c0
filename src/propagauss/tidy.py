"""Make an exported graph functional and plain: no in-place ops, no leftovers of indexing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from propagauss.graph import shape_of

aten = torch.ops.aten


def quietly(run: Callable[[], ExportedProgram]) -> ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return run()


def functional(program: ExportedProgram) -> ExportedProgram:
    """Replace in-place ops. On a value without views the plain op does; otherwise PyTorch functionalises the graph."""
    mutable = [n for n in program.graph.nodes if _is_mutable(n.target)]
    if not mutable:
        return program
    if not all(_is_private(n) for n in mutable):
        return quietly(lambda: program.run_decompositions({}))
    graph = program.graph
    for node in mutable:
        plain = _out_of_place(node.target)
        assert plain is not None
        with graph.inserting_before(node):
            new = graph.call_function(plain, node.args, node.kwargs)
        new.meta = dict(node.meta)
        later = set(_after(node))
        node.args[0].replace_all_uses_with(new, delete_user_cb=lambda user, later=later: user in later)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return program


def tidied(program: ExportedProgram) -> ExportedProgram:
    """Undo what functionalised indexing such as `x[:, 0] += 1` leaves behind.

    That is `x[:]`, plain copies, and writes to a part of a tensor, which become a concatenation. Concatenations with
    nothing go, too.
    """
    graph = program.graph
    for node in list(graph.nodes):
        new = None
        if node.target == aten.copy.default and _alike(node, node.args[1]):
            new = node.args[1]
        elif node.target == aten.cat.default:
            new = _only_part(node)
        elif node.target == aten.slice.Tensor:
            new = node.args[0] if _is_whole(*node.args[1:]) else None
        elif node.target == aten.slice_scatter.default:
            new = node.args[1] if _is_whole(*node.args[2:]) else _spliced(graph, node, *node.args)
        elif node.target == aten.select_scatter.default:
            base, source, dim, index = node.args
            with graph.inserting_before(node):
                row = _call(graph, node, aten.unsqueeze.default, source, dim)
            new = _spliced(graph, node, base, row, dim, index, index + 1 or sys.maxsize)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    return program


def _only_part(node: fx.Node) -> fx.Node | None:
    """The single part of a concatenation that is not empty (a fresh cache is prepended as an empty tensor)."""
    parts: Any = node.args[0]
    filled = [p for p in parts if 0 not in (shape_of(p) or ())]
    return filled[0] if len(filled) == 1 and len(parts) > 1 else None


def _is_whole(dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> bool:
    return start in (0, None) and step == 1 and (end is None or (isinstance(end, int) and end == sys.maxsize))


def _spliced(
    graph: fx.Graph,
    at: fx.Node,
    base: fx.Node,
    part: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> fx.Node | None:
    """`base` with the entries from `start` to `end` replaced by `part`, as a concatenation."""
    if step != 1:
        return None
    with graph.inserting_before(at):
        pieces = [part]
        if start not in (0, None):
            pieces.insert(0, _call(graph, at, aten.slice.Tensor, base, dim, 0, start))
        if end is not None and end != sys.maxsize:
            pieces.append(_call(graph, at, aten.slice.Tensor, base, dim, end, sys.maxsize))
        return _call(graph, at, aten.cat.default, pieces, dim) if len(pieces) > 1 else part


def _call(graph: fx.Graph, like: fx.Node, op: Any, *args: Any) -> fx.Node:
    """A new op at the place of `like`, with its result on the fake values of the arguments."""
    node = graph.call_function(op, args)
    node.meta = dict(like.meta)
    node.meta["val"] = op(*map_arg(args, lambda a: a.meta["val"]))
    return node


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return shape_of(a) == shape_of(b) and a.meta["val"].dtype == b.meta["val"].dtype


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _out_of_place(target: Any) -> torch._ops.OpOverload | None:
    packet = getattr(aten, target._schema.name.split("::")[1].removesuffix("_"), None)
    overload = getattr(packet, target._overloadname, None)
    return None if overload is None or overload is target else overload


def _is_private(node: fx.Node) -> bool:
    """Whether the value changed in place is an intermediate result that shares its memory with no other value."""
    changed = node.args[0] if node.args else None
    if not isinstance(changed, fx.Node) or changed.op != "call_function" or _out_of_place(node.target) is None:
        return False
    relatives = [changed, *changed.users, *node.users]
    return not any(_is_view(n.target) for n in relatives if n.op == "call_function" and n is not node)


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True  # operator.getitem and the like may hand on views
    return any(a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments)


def _after(node: fx.Node) -> list[fx.Node]:
    found, current = [], node.next
    while current.op != "root":
        found.append(current)
        current = current.next
    return found
