"""Derivatives that are taken automatically, as the ops that they come to: exports cannot look into such derivatives.

Each is traced on its own, with open sizes. The trace counts only if it gives the same for another batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from propagauss.network.linearised import Linearised
from propagauss.rules.adjoints.registry import automatic

BATCHES = (23, 29, 31, 37)  # sizes that are equal count as one: that of the batch should be like no other
OTHER = 3


def written_out(net: Linearised, leaves: Callable[[int], list[Any]]) -> tuple[Linearised, list[Any]]:
    """The same network with all derivatives that can be written out, and the ops of which they cannot.

    Args:
        leaves: inputs for a batch of some size.
    """
    others = _Recorded(net, leaves(OTHER)).calls
    if not others:
        return net, []
    calls = _Recorded(net, leaves(next((n for n in BATCHES if not _occurs(net, n)), BATCHES[0]))).calls
    graph, copies = fx.Graph(), {}
    graph.output(graph.graph_copy(net.body.graph, copies))
    body, left = fx.GraphModule(net.body, graph), []
    for i, (node, call) in enumerate(calls.items()):
        traced = _traced(node, call, others[node])
        if traced is None:
            left.append(call.op)
        else:
            body.add_module(f"written_out_{i}", traced)
            _replace(copies[node], f"written_out_{i}", call)
    body.recompile()
    found = object.__new__(type(net))
    found.__dict__.update(net.__dict__ | {"_modules": dict(net._modules)})
    found.body = body
    return found, left


class Call(NamedTuple):
    """Of an adjoint that takes its derivative automatically."""

    op: Any
    values: list[Any]  # of its arguments, in a row
    result: Tensor


class _Recorded(fx.Interpreter):
    """All such calls in a run of the network."""

    def __init__(self, net: Linearised, leaves: list[Any]):
        super().__init__(net.body)
        self.calls: dict[fx.Node, Call] = {}
        inputs = sum(n.op == "placeholder" for n in net.graph.nodes)
        self.run(*leaves, *[None] * (inputs - len(leaves)))

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        values = [self.env[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in _leaves(n)]
        token = automatic.set(ops := [])
        try:
            result = super().run_node(n)
        finally:
            automatic.reset(token)
        if ops:
            self.calls[n] = Call(ops[0], values, result)
        return result


def _leaves(node: fx.Node) -> list[Any]:
    return pytree.tree_flatten((node.args, node.kwargs))[0]


def _occurs(net: Linearised, size: int) -> bool:
    """Whether a tensor that the network has, or takes, has this size along some dimension."""
    shapes = [t.shape for t in (*net.parameters(), *net.buffers())] + [s.sizes for s in net.slots if not s.literal]
    return any(size in shape for shape in shapes)


def _traced(node: fx.Node, call: Call, other: Call) -> fx.GraphModule | None:
    """As it is if that keeps the batch open, else with the rows of all outputs in the batch."""
    values = call.values
    if any(isinstance(leaf, fx.Node) and _has_numbers(v) for leaf, v in zip(_leaves(node), values, strict=True)):
        return None  # a number that may depend on the batch would be taken for a constant
    form = pytree.tree_flatten((node.args, node.kwargs))[1]
    shapes = ([t.shape for t in _tensors(v)] for v in (values, other.values))
    batched = [len(first) > 0 and first[0] != second[0] for first, second in zip(*shapes, strict=True)]
    target: Any = node.target

    def called(tensors: Sequence[Tensor]) -> Tensor:
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten([_filled(v, rest) for v in values], form)
        return target(*args, **kwargs)

    def as_it_is(*tensors: Tensor) -> Tensor:
        return called(tensors)

    def in_the_batch(g: Tensor, *tensors: Tensor) -> Tensor:
        rows, first, *rest = g.shape
        repeated = [
            t.expand(rows, *t.shape).reshape(-1, *t.shape[1:]) if b else t
            for t, b in zip(tensors, batched[1:], strict=True)
        ]
        found = called([g.reshape(1, rows * first, *rest), *repeated])
        return found.reshape(rows, first, *found.shape[2:])

    for function in (as_it_is, in_the_batch):
        try:
            graph = make_fx(function, tracing_mode="symbolic")(*_tensors(values))
            found = graph(*_tensors(other.values))
        except Exception:  # whatever stands in the way, the derivative stays as it is
            continue
        if found.shape == other.result.shape and torch.allclose(
            found, other.result, rtol=1e-4, atol=1e-6, equal_nan=True
        ):
            return graph
    return None


def _has_numbers(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    return type(value)(_filled(v, tensors) for v in value) if isinstance(value, (list, tuple)) else value


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in _tensors(v)] if isinstance(values, (list, tuple)) else []


def _replace(node: fx.Node, name: str, call: Call) -> None:
    """Call the traced module in the place of a node, with all tensors that the node is called with."""
    graph, given = node.graph, []
    with graph.inserting_before(node):
        for leaf, value in zip(_leaves(node), call.values, strict=True):
            if isinstance(leaf, fx.Node):
                given += _parts(graph, leaf, value)
        new = graph.call_module(name, tuple(given))
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _parts(graph: fx.Graph, node: fx.Node, value: Any) -> list[fx.Node]:
    if isinstance(value, Tensor):
        return [node]
    found = []
    for i, v in enumerate(value if isinstance(value, (list, tuple)) else ()):
        if isinstance(v, (Tensor, list, tuple)):
            found += _parts(graph, graph.call_function(operator.getitem, (node, i)), v)
    return found
