"""Which values are functions of one uncertain value, so that `x * sigmoid(x)` is not taken for a product of strangers.

For every uncertain value we keep the *chain* of values it is a deterministic function of, nearest first. Two uncertain
arguments whose chains meet are both functions of the value where they meet; the op is then a function of that single
value, and is linearised as a whole. In the diagonal structure a link of the chain must be elementwise (a diagonal
covariance survives nothing else); in the full structure any op without random parameters will do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from propagauss.graph import shape_of
from propagauss.rules.shape import MOVES, SPLITS

aten = torch.ops.aten


_UNTAGGED = {
    torch.ops.aten.hardswish.default,
    torch.ops.aten.log_sigmoid.default,
    torch.ops.aten.rrelu.default,
    torch.ops.aten.selu.default,
    torch.ops.aten.celu.default,
}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_SCALING = {aten.mul.Tensor, aten.mul.Scalar, *_QUOTIENTS}
_AFFINE = {
    *MOVES,
    *SPLITS,
    operator.getitem,
    aten.cat.default,
    aten.stack.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cumsum.default,
    aten.neg.default,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.constant_pad_nd.default,
}


class Chains:
    """The chains of all uncertain values seen so far, in graph order."""

    def __init__(self, any_op: bool):
        self.any_op = any_op
        self._chain: dict[fx.Node, list[fx.Node]] = {}

    def start(self, node: fx.Node) -> None:
        """A value with randomness of its own: nothing before it explains it."""
        self._chain[node] = [node]

    def link(self, node: fx.Node, random: list[fx.Node]) -> fx.Node | None:
        """Record `node`, an op on the given uncertain values; returns the single value it is a function of, if any."""
        if not self._extends(node, random):
            self.start(node)
            return None
        source = self._meeting_point(random)
        if source is None or not self._compatible(node, source):
            self.start(node)
            return None
        self._chain[node] = [node, *self._chain[source]]
        return source

    def _extends(self, node: fx.Node, random: list[fx.Node]) -> bool:
        if self.any_op:
            return True
        return is_pointwise(node.target) and all(shape_of(r) == shape_of(node) for r in random)

    def _compatible(self, node: fx.Node, source: fx.Node) -> bool:
        return self.any_op or shape_of(node) == shape_of(source)

    def _meeting_point(self, random: list[fx.Node]) -> fx.Node | None:
        first, *others = (self._chain[r] for r in random)
        for candidate in first:
            if all(candidate in chain for chain in others) and (len(random) == 1 or _is_tensor(candidate)):
                return candidate
        return None


def region(node: fx.Node, source: fx.Node, random: set[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The function from `source` to `node` as a module, and the other values that it takes, in order."""
    graph = fx.Graph()
    inside = _between(node, source, random)
    env = {source: graph.placeholder("x")}
    extras: list[fx.Node] = []

    def resolve(arg: fx.Node) -> fx.Node:
        if arg not in env:
            extras.append(arg)
            env[arg] = graph.placeholder(f"extra_{len(extras)}")
        return env[arg]

    # placeholders have to come first, so outside values are collected before any op is copied
    for inner in inside:
        for arg in inner.all_input_nodes:
            if arg not in inside:
                resolve(arg)
    for inner in inside:
        env[inner] = graph.node_copy(inner, resolve)
    graph.output(env[node])
    return fx.GraphModule(nn.Module(), graph), extras


def is_affine(node: fx.Node, source: fx.Node, random: set[fx.Node]) -> bool:
    """Whether the function from `source` to `node` is affine, so that it needs no derivative."""
    for inner in _between(node, source, random):
        uncertain = [a in random for a in _leaves(inner.args)]
        if inner.target in _SCALING:
            if sum(uncertain) != 1 or (inner.target in _QUOTIENTS and not uncertain[0]):
                return False
        elif inner.target not in _AFFINE:
            return False
    return True


def _between(node: fx.Node, source: fx.Node, random: set[fx.Node]) -> dict[fx.Node, None]:
    """Uncertain values on the way from `source` to `node`, in graph order."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current is source or current in found:
            continue
        found.add(current)
        stack.extend(a for a in current.all_input_nodes if a in random)
    return {n: None for n in node.graph.nodes if n in found}


def is_pointwise(target: Any) -> bool:
    """Whether the op is elementwise: as PyTorch tags it, or one of those it forgot."""
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in _UNTAGGED)


def _leaves(args: Any) -> list[Any]:
    return pytree.tree_leaves(args)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
