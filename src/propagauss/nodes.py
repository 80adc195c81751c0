"""Small questions about nodes of a traced graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from propagauss.errors import UnsupportedOpError

aten = torch.ops.aten

# keys of `node.meta` by which passes talk to each other
AT_MEAN = "propagauss_at_mean"  # the op is evaluated on means, whatever is uncertain in it
STEP = "propagauss_step"  # the line of the plan for a node of the streamlined graph

# what first gave a size that only the data decide: environment of the trace -> symbol -> "op at 'module'"
_ORIGINS: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that ran the node; `(model)` for the outermost one."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("model").removeprefix(".") or "(model)"


def op_name(target: Any) -> str:
    """`aten.relu` for `torch.ops.aten.relu.default`, with the overload where it is not the default one."""
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    return name.removesuffix(".default")


def nodes_in(arg: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(arg, lambda n: found.append(n) or n)
    return found


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of an op, however it was passed."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def reached(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on any of `sources`, these included; that their size does is not enough."""
    found = set(sources)
    for node in graph.nodes:
        size = isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool))
        if not size and any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def mend_readers(graph: fx.Graph) -> None:
    """torch.export (2.13) may leave out an op among the readers of its argument (`x[:]` in a rotary embedding)."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def replace(program: ExportedProgram, old: fx.Node, new: fx.Node) -> None:
    """Put `new` in the place of `old`, also where the program returns it."""
    old.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(old.name, new.name)
    erase(old)


def erase(node: fx.Node) -> None:
    """Remove an op that nobody reads, and what only it read."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        if not source._erased and not source.users and source.op in ("call_function", "get_attr"):
            erase(source)


def call(graph: fx.Graph, like: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new op at the place of `like`, with its result on the fake values of the arguments."""
    node = graph.call_function(op, args, kwargs)
    node.meta = dict(like.meta)
    evaluate(node)
    return node


def evaluate(node: fx.Node) -> None:
    """Work out the fake value of an op from those of its arguments."""
    op: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda a: a.meta["val"])  # type: ignore[misc]
    node.meta["val"] = op(*args, **kwargs)  # type: ignore[misc]


def is_custom(target: Any) -> bool:
    """Whether an op is not PyTorch's own. Forward derivatives of such an op are zero, without a word (torch 2.13)."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")


def is_assertion(target: Any) -> bool:
    return "assert" in op_name(target) or "sym_constrain" in op_name(target)


A_NUMBER = "makes a plain number of an uncertain value: keep it a tensor, without .item()"


def makes_number(node: fx.Node) -> bool:
    """Whether an op reads a real tensor as a number, which has no derivative."""
    reads = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
    return node.target in reads and any(is_float(a) for a in node.all_input_nodes)


def is_float(node: fx.Node) -> bool:
    """Whether a value, or a part of it, is a real or complex floating-point tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def is_transpose(node: fx.Node) -> bool:
    if len(shape_of(node) or ()) != 2:
        return False
    if node.target in (aten.t.default, aten.numpy_T.default, aten.mT.default):
        return True
    order: Any = node.args[1:]
    if node.target == aten.transpose.int:
        return {a % 2 for a in order} == {0, 1}
    return node.target == aten.permute.default and [a % 2 for a in order[0]] == [1, 0]


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Sizes that can be compared: an open one as its expression, since comparing symbolic sizes would fix them."""
    value = node.meta.get("val")
    return tuple(_expression(s) for s in value.shape) if isinstance(value, Tensor) else None


def _expression(size: Any) -> Any:
    return size.node.expr if is_open(size) else hint(size)


def dtype_of(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def depends(size: Any, symbols: set[Any]) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols & symbols)


def hint(size: Any) -> int:
    """A size in the traced example; an error if only the data decide it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if free_unbacked_symbols(size):
        raise UnsupportedOpError(_data_dependent(size))
    return int(size.node.expr if size.node.hint is None else size.node.hint)  # no hint: the model fixed it later


def remember_origins(graph: fx.Graph) -> None:
    """Note which op each size that depends on the data comes from, for the error that names it."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else [values]:
            for size in getattr(value, "shape", ()):
                if isinstance(size, torch.SymInt):
                    known = _ORIGINS.setdefault(size.node.shape_env, {})
                    for symbol in free_unbacked_symbols(size):
                        known.setdefault(symbol, f"{op_name(node.target)} at '{module_path(node)}'")


def _data_dependent(size: Any) -> str:
    known = _ORIGINS.get(size.node.shape_env, {})
    origins = sorted({known[s] for s in free_unbacked_symbols(size) if s in known}) or ["an op"]
    return (
        f"cannot streamline this model: {', '.join(origins)} gives a result whose size depends on the values of the "
        "data, and what comes after it is uncertain. Select with torch.where or by multiplying with a mask, so that "
        "sizes stay the same, or leave the parameters before and after it out of the posterior."
    )


def is_open(size: Any) -> bool:
    """Whether a size may differ from the example's; a size that the model fixed is symbolic only in name."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)
