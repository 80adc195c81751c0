"""Make an exported graph functional: no op changes a value in place.

On a value that shares its memory with no other the plain op does; otherwise PyTorch functionalises the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from propagauss.errors import InputError
from propagauss.nodes import argument, module_path, replace
from propagauss.rules.facts import facts
from propagauss.tracing.exporting import first_line, quietly

aten = torch.ops.aten


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops; also without those that return their input itself."""
    graph = program.graph
    for node in list(graph.nodes):
        if _returns_itself(node):
            replace(program, node, node.args[0])
    mutable = [n for n in graph.nodes if _is_mutable(n.target)]
    if not mutable:
        return program
    if not all(_is_private(n) for n in mutable):
        return _functionalised(program)
    for node in mutable:
        plain = _out_of_place(node.target)
        assert plain is not None
        with graph.inserting_before(node):
            new = graph.call_function(plain, node.args, node.kwargs)
        new.meta = dict(node.meta)
        later = set(_after(node))
        node.args[0].replace_all_uses_with(new, delete_user_cb=lambda user, later=later: user in later)
        replace(program, node, new)
    return program


def _returns_itself(node: fx.Node) -> bool:
    """Dropout that is switched off, and `detach_`, which changes no values: `torch.tensor(...)` in a model has one."""
    off = facts(node.target).drops_out and not (argument(node, 2, "train") and argument(node, 1, "p"))
    return off or node.target == aten.detach_.default


def _functionalised(program: ExportedProgram) -> ExportedProgram:
    """By PyTorch, after ops that hide from it that they return views have been replaced by ops that do not."""
    for node in program.graph.nodes:
        plain = facts(node.target).same_as
        if plain is not None:
            node.target = plain
        elif node.target == aten.einsum.default and len(node.args[1]) == 1:
            _open_up(node)
    program.graph_module.recompile()
    try:
        return quietly(lambda: program.run_decompositions({}))
    except Exception as error:
        raise InputError(
            "the model changes values in place in a way that PyTorch cannot undo "
            f"({type(error).__name__}: {first_line(error)}): use ops that return a new tensor"
        ) from error


def _open_up(node: fx.Node) -> None:
    """An einsum of one operand that only permutes returns a view."""
    equation = str(node.args[0]).replace(" ", "")
    left, _, right = equation.partition("->")
    right = right if "->" in equation else "".join(sorted(left))
    if len(set(left)) < len(left) or "." in left:
        raise InputError(
            f"einsum('{node.args[0]}') at '{module_path(node)}' may return a view, in a model that changes values in "
            "place: write it with permute, diagonal or sum"
        )
    if sorted(left) == sorted(right):
        operands: Any = node.args[1]
        node.target = aten.permute.default
        node.args = (operands[0], [left.index(letter) for letter in right])
        node.kwargs = {}


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _out_of_place(target: Any) -> torch._ops.OpOverload | None:
    packet = getattr(aten, target._schema.name.split("::")[1].removesuffix("_"), None)
    overload = getattr(packet, target._overloadname, None)
    return None if overload is None or overload is target else overload


def _is_private(node: fx.Node) -> bool:
    """Whether the value changed in place is an intermediate result that shares its memory with no other value."""
    changed = node.args[0] if node.args else None
    if not isinstance(changed, fx.Node) or changed.op != "call_function" or not _keeps_dtype(node):
        return False
    relatives = [changed, *changed.users, *node.users]
    return not any(_may_alias(n.target) for n in relatives if n.op == "call_function" and n is not node)


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether the plain op gives the dtype that the value changed in place has: it may promote where that cannot."""
    plain: Any = _out_of_place(node.target)
    if plain is None:
        return False
    values: Any = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        result = plain(*values[0], **values[1])
    except Exception:  # PyTorch then has to find out itself
        return False
    return isinstance(result, Tensor) and result.dtype == values[0][0].dtype and result.dim() == values[0][0].dim()


def _may_alias(target: Any) -> bool:
    """Whether the result of an op may share memory with its arguments (other than by changing them in place)."""
    if not isinstance(target, torch._ops.OpOverload):
        return True  # operator.getitem and the like may hand on views
    if any(a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments):
        return True
    composed = target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    return composed and not target._schema.is_mutable and not facts(target).fresh


def _after(node: fx.Node) -> list[fx.Node]:
    found, current = [], node.next
    while current.op != "root":
        found.append(current)
        current = current.next
    return found
