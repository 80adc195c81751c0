"""Make a functional graph plain: no leftovers of indexing, no identities, nothing that is undone at once."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from propagauss.nodes import argument, call, dtype_of, is_assertion, is_open, replace, shape_of
from propagauss.rules.facts import facts

aten = torch.ops.aten


def tidied(program: ExportedProgram) -> ExportedProgram:
    """Undo what functionalised indexing such as `x[:, 0] += 1` leaves behind, and what has no effect.

    That is `x[:]`, plain copies, writes to a part of a tensor, which become a concatenation, concatenations with
    nothing, identities, permutations that cancel, and parts of a stack.
    """
    for node in list(program.graph.nodes):
        if node._erased:  # with another that was its only reader
            continue
        new = _simpler(program.graph, node) if node.op == "call_function" else None
        if new is not None:
            replace(program, node, new)
    _merge_equals(program)
    return program


def _merge_equals(program: ExportedProgram) -> None:
    """What is computed twice is one value, also for whoever asks whether two values are the same."""
    known: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node._erased or node.op != "call_function" or is_assertion(node.target):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        if key in known:
            replace(program, node, known[key])
        else:
            known[key] = node


def _simpler(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """What a node may be replaced by, if there is anything."""
    args: Any = node.args
    known = facts(node.target)
    if known.returns_input or (known.drops_out and not argument(node, 2, "train", False)):
        return args[0] if _alike(node, args[0]) else None
    if known.same_as is not None:
        with graph.inserting_before(node):
            new = graph.call_function(known.same_as, node.args, node.kwargs)
        new.meta = dict(node.meta)
        return new
    if node.target == aten.copy.default:
        return args[1] if _alike(node, args[1]) else None
    if node.target == aten.cat.default:
        return _only_part(node)
    if node.target == aten.slice.Tensor:
        return args[0] if _is_whole(*args[1:]) else None
    if node.target == aten.slice_scatter.default:
        return args[1] if _is_whole(*args[2:]) else _spliced(graph, node, *args)
    if node.target == aten.select_scatter.default:
        base, source, dim, index = args
        with graph.inserting_before(node):
            row = call(graph, node, aten.unsqueeze.default, source, dim)
        return _spliced(graph, node, base, row, dim, index, index + 1 or sys.maxsize)
    if node.target in _EMPTY:
        return _zeros(graph, node)
    if node.target in (aten.zero.default, aten.fill.Scalar, aten.fill.Tensor):
        return _filled(graph, node)
    if node.target == aten.heaviside.default:
        return _step(graph, node)
    if _order(node) is not None:
        return _unmoved(graph, node)
    if known.reduces:
        return _over_stack(graph, node)
    return _part_of_stack(node)


_EMPTY: dict[Any, Any] = {
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
    aten.empty.memory_format: aten.zeros.default,
}


def _zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Numbers where a model makes room for some, so that two runs are the same."""
    settings = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
    with graph.inserting_before(node):
        new = graph.call_function(_EMPTY[node.target], node.args, settings)
    new.meta = dict(node.meta)
    return new


def _filled(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """`x.zero_()` and `x.fill_(c)` take only sizes from `x`."""
    x: Any = node.args[0]
    value: Any = node.args[1] if node.target != aten.zero.default else 0
    if isinstance(value, fx.Node) and dtype_of(value) != dtype_of(node):
        return None
    like = node.meta["val"]
    with graph.inserting_before(node):
        sizes = [call(graph, node, aten.sym_size.int, x, i) if is_open(s) else s for i, s in enumerate(like.shape)]
        plain = 0 if isinstance(value, fx.Node) else value
        new = graph.call_function(aten.full.default, (sizes, plain), {"dtype": like.dtype, "device": like.device})
        new.meta = dict(node.meta)
        return call(graph, node, aten.add.Tensor, new, value) if isinstance(value, fx.Node) else new


def _step(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`heaviside` by comparisons: PyTorch has no derivative of it."""
    x, at_zero = node.args
    with graph.inserting_before(node):
        past = call(graph, node, aten.to.dtype, call(graph, node, aten.gt.Scalar, x, 0), node.meta["val"].dtype)
        return call(graph, node, aten.where.self, call(graph, node, aten.eq.Scalar, x, 0), at_zero, past)


def _over_stack(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The mean, say, of an ensemble `stack([f(x), g(x)])` with its members behind the samples, which stay in front."""
    stack: Any = node.args[0]
    dims = argument(node, 1, "dim")
    if stack.target != aten.stack.default or dims not in (0, [0]) or argument(node, 2, "keepdim", False):
        return None
    if argument(stack, 1, "dim", 0) != 0 or len(shape_of(stack) or ()) < 2:
        return None
    with graph.inserting_before(node):
        members = call(graph, node, aten.stack.default, stack.args[0], 1)
        op: Any = node.target
        new = graph.call_function(op, (members, 1 if dims == 0 else [1]), node.kwargs)
    new.meta = dict(node.meta)
    return new


def _unmoved(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The source of permutations that cancel, and `stack(x, 1)` for `stack(x, 0).transpose(0, 1)`."""
    order = list(range(len(shape_of(node) or ())))
    current: Any = node
    while (step := _order(current)) is not None:
        order, current = [step[i] for i in order], current.args[0]
        if order == sorted(order):
            return current
    if current.target == aten.stack.default and len(order) > 1:
        dim = argument(current, 1, "dim", 0) % len(order)
        rest = [i for i in order if i != dim]
        if rest == sorted(rest):
            with graph.inserting_before(node):
                return call(graph, node, aten.stack.default, current.args[0], order.index(dim))
    return None


def _order(node: fx.Node) -> list[int] | None:
    """Which dimension of the input each dimension of the output is; None for an op that does not permute them."""
    n = len(shape_of(node) or ())
    if node.target == aten.permute.default:
        dims: Any = argument(node, 1, "dims")
        return [d % n for d in dims]
    if n < 2 or node.target not in (aten.transpose.int, aten.t.default, aten.mT.default):
        return None
    args: Any = node.args
    first, second = args[1:3] if node.target == aten.transpose.int else (-2, -1)
    order = list(range(n))
    order[first], order[second] = order[second], order[first]
    return order


def _part_of_stack(node: fx.Node) -> fx.Node | None:
    """`stack(x, d)[i]` along `d` is `x_i`, as in the last state of a recurrent layer."""
    args: Any = node.args
    if node.target is operator.getitem and getattr(args[0], "target", None) == aten.unbind.int:
        source, dim, index = args[0].args[0], argument(args[0], 1, "dim", 0), args[1]
    elif node.target == aten.select.int:
        source, dim, index = args
    elif node.target == aten.squeeze.dim:
        source, dim, index = *args, 0
    else:
        return None
    if source.target != aten.stack.default or not isinstance(index, int):
        return None
    parts, n = source.args[0], len(shape_of(source) or (0,))
    if dim % n != argument(source, 1, "dim", 0) % n or (node.target == aten.squeeze.dim and len(parts) > 1):
        return None
    return parts[index] if -len(parts) <= index < len(parts) else None


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
    if step != 1 or 0 in (shape_of(part) or ()):
        return None
    with graph.inserting_before(at):
        pieces = [part]
        if start not in (0, None):
            pieces.insert(0, call(graph, at, aten.slice.Tensor, base, dim, 0, start))
        if end is not None and end != sys.maxsize:
            pieces.append(call(graph, at, aten.slice.Tensor, base, dim, end, sys.maxsize))
        return call(graph, at, aten.cat.default, pieces, dim) if len(pieces) > 1 else part


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return shape_of(a) == shape_of(b) and a.meta["val"].dtype == b.meta["val"].dtype
