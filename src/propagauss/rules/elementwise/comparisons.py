"""Which comparisons belong to an elementwise function of one uncertain value, such as `where(h > 0, h, 0.)`.

When first two moments are matched, such a comparison must not be decided by the mean: it is part of the function. Any
other one, whose answer goes somewhere else, is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from propagauss.nodes import is_assertion, shape_of
from propagauss.rules.elementwise.piecewise import RULES
from propagauss.rules.facts import facts
from propagauss.rules.facts import is_elementwise as works_entry_by_entry

aten = torch.ops.aten


def decisions(graph: fx.Graph) -> set[fx.Node]:
    """All comparisons, and logical combinations of them."""
    return {n for n in graph.nodes if is_decision(n)}


def is_decision(node: fx.Node) -> bool:
    """Whether an op compares, or combines what is true or false."""
    known = facts(node.target)
    return known.compares or known.combines


def is_elementwise(node: fx.Node) -> bool:
    """Whether the op works entry by entry: as PyTorch tags it, or as it is known here (casts, `where` of a number)."""
    op = node.target
    return op in RULES or works_entry_by_entry(op)


def is_constant(node: fx.Node) -> bool:
    """Whether a value is the same for all inputs, as far as its own node says."""
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)


def fusable_comparison(node: fx.Node, certain: Callable[[fx.Node], bool] = is_constant) -> bool:
    """Whether a comparison, or a logical combination of some, only decides elementwise functions of what it compares.

    All that is made of the answer, up to the first values that are no longer true or false, must be elementwise, in one
    shape, and depend on a single value that is not certain.

    Args:
        certain: whether a value is not uncertain; it is asked about values behind this node in the graph, too.
    """
    if not is_decision(node):
        return False
    decided = _decided(node)
    return decided is not None and any(
        all(_is_function_of(source, value, certain) for value in decided) for source in _sources(node, certain)
    )


def _decided(node: fx.Node) -> list[fx.Node] | None:
    """The values that are decided by an answer; None if it is used in another way."""
    found: list[fx.Node] = []
    for user in node.users:
        if is_assertion(user.target):
            continue
        if user.op != "call_function" or not is_elementwise(user):
            return None
        if is_decision(user):
            further = _decided(user)
            if further is None:
                return None
            found.extend(further)
        else:
            found.append(user)
    return found or None


def _sources(node: fx.Node, certain: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Values that `node` may be a function of, nearest first: back while there is only one that is not certain."""
    found: list[fx.Node] = []
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    layer = {a for a in node.all_input_nodes if not certain(a)}
    while layer:
        if len(layer) == 1:
            found.extend(layer)
        latest = max(layer, key=order.__getitem__)
        if latest.op != "call_function" or not is_elementwise(latest):
            break
        layer = (layer - {latest}) | {a for a in latest.all_input_nodes if not certain(a)}
    return found


def _is_function_of(source: fx.Node, value: fx.Node, certain: Callable[[fx.Node], bool]) -> bool:
    """Whether `value` is an elementwise function of `source` and of certain values, in the shape of `source`."""
    if shape_of(value) != shape_of(source):
        return False
    stack, seen = [value], {source}
    while stack:
        current = stack.pop()
        if current in seen or certain(current):
            continue
        if current.op != "call_function" or not is_elementwise(current):
            return False
        seen.add(current)
        stack.extend(current.all_input_nodes)
    return True
