"""Positions that nobody reads are not computed: a selection moves in front of the ops that treat positions alike.

A classifier often reads one position of its last block: a class token, the last token. `layer_norm(h)[:, 0]` is
`layer_norm(h[:, 0])`, and so on, up to where other positions are needed: keys and values of that block. What comes
after is then computed, and differentiated, for one position instead of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.nodes import argument, call, depends, erase, hint, is_float, is_open, shape_of
from propagauss.rules.facts import facts, is_elementwise
from propagauss.tracing.trace import Traced

aten = torch.ops.aten
_SAME = {aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default}
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
}


@dataclass(frozen=True)
class Selection:
    """Which positions along a dimension: `length` of them from `start` on, or one for each sample, by `index [B]`."""

    start: int = 0
    length: int = 1
    index: fx.Node | None = None

    def fits(self, x: fx.Node) -> bool:
        """Whether the positions of `x` can be taken: one for each sample only where samples are its rows."""
        same = self.index is None or (shape_of(x) or ())[:1] == shape_of(self.index)
        return same and (self.index is None or not any(is_open(s) for s in x.meta["val"].shape[1:]))

    def take(self, graph: fx.Graph, x: fx.Node, dim: int) -> fx.Node:
        """The positions, in a dimension of this length at the same place."""
        if self.index is None:
            return call(graph, x, aten.slice.Tensor, x, dim, self.start, self.start + self.length)
        shape = x.meta["val"].shape
        counted = call(graph, self.index, aten.add.Scalar, self.index, hint(shape[dim]))  # negative: from the end
        negative = call(graph, self.index, aten.lt.Scalar, self.index, 0)
        index = call(graph, self.index, aten.where.self, negative, counted, self.index)
        column = call(graph, self.index, aten.reshape.default, index, [-1] + [1] * (len(shape) - 1))
        sizes = [-1, *(1 if d == dim else hint(s) for d, s in enumerate(shape) if d)]
        return call(graph, x, aten.gather.default, x, dim, call(graph, self.index, aten.expand.default, column, sizes))


Chosen = tuple[int, Selection]
Take = Callable[[Any, int], Any]


def select_early(traced: Traced) -> None:
    """Move selections of positions as far to the front of the graph as they go."""
    if traced.batch_is_dynamic:
        _Mover(traced).run()


class _Mover:
    def __init__(self, traced: Traced):
        self.traced, self.graph = traced, traced.graph
        self.made: dict[fx.Node, Chosen] = {}  # results of a selection

    def run(self) -> None:
        for node in list(self.graph.nodes):
            self._read(node)
        for node in reversed(list(self.graph.nodes)):
            choices = {self.made.get(user) for user in node.users}
            if len(choices) == 1 and None not in choices and node.op == "call_function" and is_float(node):
                self._move(node, *choices.pop())  # type: ignore[misc]
        self._merge()

    def _read(self, node: fx.Node) -> None:
        """An op of the model that selects positions becomes one that keeps the dimension, and one that drops it."""
        found = _selection(node, self.traced.batch_symbols)
        if found is None:
            return
        source, (dim, selection) = node.args[0], found
        if source.op != "call_function" or _moved(source, dim, selection, lambda x, d: x) is None:  # type: ignore[union-attr]
            return
        if node.target == aten.slice.Tensor:
            self.made[node] = found
            return
        with self.graph.inserting_before(node):
            kept = selection.take(self.graph, source, dim)  # type: ignore[arg-type]
            self.made[kept] = found
            self._replace(node, call(self.graph, node, aten.select.int, kept, dim, 0))

    def _move(self, node: fx.Node, dim: int, selection: Selection) -> None:
        """`select(op(x))` -> `op(select(x))`"""

        def take(x: fx.Node, d: int) -> fx.Node:
            taken = selection.take(self.graph, x, d)
            self.made[taken] = d, selection
            return taken

        arguments = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
        if not all(selection.fits(a) for a in _sliced(node, dim, selection, arguments)):
            return
        with self.graph.inserting_before(min(node.users)):
            steps = _moved(node, dim, selection, take)
            if steps is None:
                return
            new: Any = None
            for op, args, kwargs in steps:
                new = call(self.graph, node, op, *(new if a is _LAST else a for a in args), **kwargs)
        for user in list(node.users):
            self._replace(user, new)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """What only the old node read goes with it."""
        old.replace_all_uses_with(new)
        self.traced.outputs[:] = [new if o is old else o for o in self.traced.outputs]
        erase(old)

    def _merge(self) -> None:
        """One node for equal selections of the same value."""
        first: dict[Any, fx.Node] = {}
        for node in list(self.graph.nodes):
            if node in self.made:
                same = first.setdefault((node.args[0], self.made[node]), node)
                if same is not node:
                    self._replace(node, same)


class _Last:
    """Stands for the result of the step before."""


_LAST = _Last()
Steps = list[tuple[Any, tuple[Any, ...], dict[str, Any]]]


def _selection(node: fx.Node, symbols: set[Any]) -> Chosen | None:
    """What an op of the model selects, if it is some positions of a dimension that has more of them."""
    source = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, fx.Node) or not is_float(source):
        return None
    shape = source.meta["val"].shape if isinstance(source.meta["val"], Tensor) else ()
    if node.target in (aten.select.int, aten.slice.Tensor):
        dim = argument(node, 1, "dim", 0) % max(len(shape), 1)
        if dim == 0 or is_open(shape[dim]):
            return None
        size = hint(shape[dim])
        if node.target == aten.select.int:
            at = node.args[2]
            return (dim, Selection(at % size)) if isinstance(at, int) and size > 1 else None
        start, end, step = (argument(node, i, n, v) for i, n, v in ((2, "start", 0), (3, "end", None), (4, "step", 1)))
        if step != 1 or not all(v is None or isinstance(v, int) for v in (start, end)):
            return None
        start, end, _ = slice(start, end).indices(size)
        return (dim, Selection(start, end - start)) if 0 < end - start < size else None
    if node.target == aten.index.Tensor and len(shape) > 1 and not is_open(shape[1]):
        indices: Any = node.args[1]
        if len(indices) == 2 and all(isinstance(i, fx.Node) for i in indices):
            rows, at = indices
            whole = rows.target == aten.arange.default and len(rows.args) == 1
            whole = whole and shape_of(rows) == (shape_of(source) or ())[:1] == shape_of(at)
            if whole and depends(shape[0], symbols) and at.meta["val"].dtype == torch.int64:
                return 1, Selection(index=at)
    return None


def _sliced(node: fx.Node, dim: int, selection: Selection, arguments: list[fx.Node]) -> list[fx.Node]:
    """The arguments of which positions would be taken."""
    found: list[fx.Node] = []
    _moved(node, dim, selection, lambda x, d: found.append(x) or x)
    return found


# -- what an op needs of its arguments, so that its result has the positions that are wanted


def _moved(node: fx.Node, dim: int, selection: Selection, take: Take) -> Steps | None:
    """The op on positions alone, as calls one after the other; None if it needs others, too."""
    op: Any = node.target
    rank = node.meta["val"].dim() if isinstance(node.meta.get("val"), Tensor) else 0
    last = rank - 1
    args, kwargs = node.args, dict(node.kwargs)
    first: Any = args[0] if args else None
    known = facts(op)
    if is_elementwise(op) or known.casts or known.drops_out or op in _SAME:
        return [(op, *_each(node, rank, dim, take))]
    if op == aten.linear.default and dim < last:
        return [(op, (take(first, dim), *args[1:]), kwargs)]
    if op in (aten.layer_norm.default, aten.rms_norm.default) and dim < rank - len(args[1]):  # type: ignore[arg-type]
        return [(op, (take(first, dim), *args[1:]), kwargs)]
    if op in (aten.softmax.int, aten._softmax.default) and dim != args[1] % rank:  # type: ignore[operator]
        return [(op, (take(first, dim), *args[1:]), kwargs)]
    if op == aten.transpose.int:
        a, b = (int(d) % rank for d in args[1:])  # type: ignore[arg-type]
        return [(op, (take(first, {a: b, b: a}.get(dim, dim)), *args[1:]), kwargs)]
    if op == aten.permute.default:
        return [(op, (take(first, args[1][dim] % rank), *args[1:]), kwargs)]  # type: ignore[index]
    if op in (aten.matmul.default, aten.bmm.default) and dim == last - 1 and first.meta["val"].dim() == rank:
        return [(op, (take(first, dim), *args[1:]), kwargs)]
    if op == aten.cat.default and dim != argument(node, 1, "dim", 0) % rank:
        return [(op, ([take(part, dim) for part in first], *args[1:]), kwargs)]
    if op == aten.scaled_dot_product_attention.default and dim == last - 1:
        return _attention(node, dim, selection, take)
    if op in _RESHAPES:
        return _reshaped(node, dim, selection, take)
    return None


def _each(node: fx.Node, rank: int, dim: int, take: Take) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an elementwise op; those that are broadcast along the dimension stay whole."""

    def part(arg: Any) -> Any:
        if not isinstance(arg, fx.Node) or not isinstance(arg.meta.get("val"), Tensor):
            return arg
        shape = arg.meta["val"].shape
        at = dim - (rank - len(shape))
        return arg if at < 0 or (not is_open(shape[at]) and hint(shape[at]) == 1) else take(arg, at)

    return tuple(map(part, node.args)), {k: part(v) for k, v in node.kwargs.items()}


def _attention(node: fx.Node, dim: int, selection: Selection, take: Take) -> Steps | None:
    """Queries, and their rows of the mask. A causal mask hides nothing from the last of all positions."""
    q, k, v = node.args[:3]
    mask, causal = argument(node, 3, "attn_mask"), argument(node, 5, "is_causal", False)
    if causal:
        positions = hint(q.meta["val"].shape[-2])  # type: ignore[union-attr]
        ends = selection.index is None and selection.length == 1 and selection.start == positions - 1
        if not ends or positions != hint(k.meta["val"].shape[-2]):  # type: ignore[union-attr]
            return None
    if q.meta["val"].dim() != node.meta["val"].dim():  # type: ignore[union-attr]
        return None
    if mask is not None and mask.meta["val"].dim() > 1:
        rows = mask.meta["val"].shape
        mask = mask if hint(rows[-2]) == 1 else take(mask, len(rows) - 2)
    rest = {name: v for name, v in node.kwargs.items() if name in ("scale", "enable_gqa")}
    return [(node.target, (take(q, dim), k, v, mask, 0.0, False), rest)]


def _reshaped(node: fx.Node, dim: int, selection: Selection, take: Take) -> Steps | None:
    """Another shape, if the dimension is one of the argument, too; or a matrix product on rows of all samples."""
    source: Any = node.args[0]
    shape = node.meta["val"].shape
    if any(is_open(s) for s in shape[1:]):
        return None
    sizes = [-1, *(selection.length if d == dim else hint(s) for d, s in enumerate(shape) if d)]
    at = _same_dimension(source, node, dim)
    if at is not None:
        return [(aten.reshape.default, (take(source, at), sizes), {})]
    flat = source.args[1] if source.target == aten.addmm.default and len(source.users) == 1 else None
    if flat is None or flat.target not in _RESHAPES or source.args[0].meta["val"].dim() != 1:
        return None
    x = flat.args[0]
    if (shape_of(x) or ())[:-1] != (shape_of(node) or ())[:-1] or dim == len(shape) - 1:
        return None
    rows = take(x, dim)
    width = hint(x.meta["val"].shape[-1])
    return [
        (aten.reshape.default, (rows, [-1, width]), {}),
        (aten.addmm.default, (source.args[0], _LAST, source.args[2]), dict(source.kwargs)),
        (aten.reshape.default, (_LAST, sizes), {}),
    ]


def _same_dimension(source: fx.Node, node: fx.Node, dim: int) -> int | None:
    """Where the dimension of the result is in the argument: as long, with as many entries before it."""
    before, after = shape_of(source) or (), shape_of(node) or ()
    for at in range(1, len(before)):
        if before[at] == after[dim] and math.prod(before[:at]) == math.prod(after[:dim]):
            return at
    return None
