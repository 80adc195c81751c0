"""Which values are functions of one uncertain value, so that `x * sigmoid(x)` is not taken for a product of strangers.

For every uncertain value we keep the *chain* of values it is a deterministic function of, nearest first. Two uncertain
arguments whose chains meet are both functions of the value where they meet; the op is then a function of that single
value, and is linearised as a whole. In the diagonal structure a link of the chain must be elementwise (a diagonal
covariance survives nothing else); in the full structure any op without random parameters will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, fx, nn

from propagauss.nodes import shape_of
from propagauss.rules.facts import differentiable, facts
from propagauss.rules.facts import is_elementwise as is_pointwise
from propagauss.rules.registry import arguments, map_arguments


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
        source = self._meeting_point(node, random)
        if source is None:
            self.start(node)
            return None
        self._chain[node] = [node, *self._chain[source]]
        return source

    def links(self, node: fx.Node) -> list[fx.Node]:
        """The values that `node` is a function of, nearest first; itself in front."""
        return self._chain[node]

    def _extends(self, node: fx.Node, random: list[fx.Node]) -> bool:
        if self.any_op or _keeps_order(node.target):
            return True
        return is_pointwise(node.target) and all(shape_of(r) == shape_of(node) for r in random)

    def _meeting_point(self, node: fx.Node, random: list[fx.Node]) -> fx.Node | None:
        first, *others = (self._chain[r] for r in random)
        for candidate in first:
            fits = self.any_op or random == [candidate] or shape_of(candidate) == shape_of(node)
            known = _is_real(candidate) or _has_parts(candidate, random)
            if fits and known and all(candidate in chain for chain in others):
                return candidate
        return None


def cut(
    node: fx.Node, sources: Sequence[fx.Node], random: AbstractSet[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The function from `sources` to `node` as a module, and the other values that it takes, in order.

    It takes the sources first. What an op takes at its mean is among the other values, even if it is a source, too.
    """
    graph = fx.Graph()
    inside = _between(node, sources, random)
    env: dict[fx.Node, fx.Node] = {s: graph.placeholder(f"x_{i}") for i, s in enumerate(sources)}
    others: dict[fx.Node, fx.Node] = {}

    def other(arg: fx.Node) -> fx.Node:
        if arg not in others:
            others[arg] = graph.placeholder(f"extra_{len(others)}")
        return others[arg]

    def value(arg: fx.Node) -> fx.Node:
        return env[arg] if arg in env else other(arg)

    # placeholders have to come first, so outside values are collected before any op is copied
    for inner in inside:
        map_arguments(inner, lambda a: a if a in inside or a in env else other(a), other)
    for inner in inside:
        args, kwargs = map_arguments(inner, value, other)
        target: Any = inner.target
        env[inner] = graph.call_function(differentiable(target), args, kwargs)
        env[inner].meta["val"] = inner.meta.get("val")
    graph.output(env[node])
    return fx.GraphModule(nn.Module(), graph), list(others)


def _between(node: fx.Node, sources: Sequence[fx.Node], random: AbstractSet[fx.Node]) -> dict[fx.Node, None]:
    """Uncertain values on the way from `sources` to `node`, in graph order."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current in sources or current in found:
            continue
        found.add(current)
        stack.extend(a for a in arguments(current) if a in random)
    return {n: None for n in node.graph.nodes if n in found}


def is_elementwise(target: Any) -> bool:
    """Whether the op, as part of a function, keeps entries apart."""
    return is_pointwise(target) or _keeps_order(target)


def _keeps_order(target: Any) -> bool:
    """Whether entry k of the result is entry k of the argument, in the order of memory."""
    known = facts(target)
    return known.keeps_order or known.casts


def _has_parts(node: fx.Node, random: list[fx.Node]) -> bool:
    """Whether a value in several parts is the only argument of an op that picks one."""
    return random == [node] and isinstance(node.meta.get("val"), (tuple, list))


def _is_real(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
