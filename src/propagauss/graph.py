"""Small questions about nodes of a traced graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

aten = torch.ops.aten


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


def is_assertion(target: Any) -> bool:
    return "assert" in op_name(target) or "sym_constrain" in op_name(target)


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
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def is_open(size: Any) -> bool:
    """Whether a size may differ from the example's; a size that the model fixed is symbolic only in name."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)
