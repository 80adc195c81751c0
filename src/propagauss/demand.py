"""Which values have a spread that anybody asks for.

Attention takes queries and keys by their mean, sizes and comparisons do not depend on a spread at all. What feeds only
such readers is computed as in the plain model.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from propagauss.graph import is_float, nodes_in
from propagauss.patterns import AT_MEAN
from propagauss.rules.registry import MEAN_ONLY


def wanted(graph: fx.Graph, outputs: list[Any]) -> set[fx.Node]:
    """The nodes whose spread reaches an output, going back from the outputs."""
    found: set[fx.Node] = set()
    stack = nodes_in(outputs)
    while stack:
        node = stack.pop()
        if node in found or not is_float(node) or node.meta.get(AT_MEAN):
            continue
        found.add(node)
        ignored = MEAN_ONLY.get(node.target, ())
        stack.extend(n for i, arg in enumerate(node.args) if i not in ignored for n in nodes_in(arg))
        stack.extend(nodes_in(node.kwargs))
    return found
