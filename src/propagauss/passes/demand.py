"""Which values have a variance that anybody asks for.

Attention fixes queries and keys at their means, and sizes and comparisons do not depend on a variance at all. What
feeds only such readers is computed as in the plain model.
"""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from propagauss.nodes import AT_MEAN, is_float, nodes_in, shape_of
from propagauss.rules.facts import facts
from propagauss.rules.registry import fixed_positions


def wanted(graph: fx.Graph, outputs: list[Any], decided: AbstractSet[fx.Node] = frozenset()) -> set[fx.Node]:
    """The nodes whose variance reaches an output, going back from the outputs.

    `decided` are comparisons that count as part of a function; the others depend on means alone.
    """
    found: set[fx.Node] = set()
    stack = nodes_in(outputs)
    while stack:
        node = stack.pop()
        if node in found or not (is_float(node) or node in decided) or node.meta.get(AT_MEAN):
            continue
        found.add(node)
        ignored = fixed_positions(node)
        stack.extend(n for i, arg in enumerate(node.args) if i not in ignored for n in nodes_in(arg))
        stack.extend(nodes_in(node.kwargs))
    return found


def wanted_outputs(layer: fx.Node, wanted: AbstractSet[fx.Node]) -> tuple[int, int] | None:
    """The range of a layer's outputs (last dimension) whose variance is wanted; None if that of all of them is.

    A fused projection makes queries, keys and values at once and is split: only values have a variance that matters.
    """
    node, width = layer, _width(layer)
    while True:
        readers = [user for user in node.users if _reads(user)]
        if len(readers) != 1:
            return None
        (reader,) = readers
        if not facts(reader.target).keeps_order:
            break
        if _width(reader) != width:
            return None
        node = reader
    sizes = _parts(reader, width)
    if sizes is None or any(user.target is not operator.getitem for user in reader.users):
        return None
    read: list[Any] = [user.args[1] for user in reader.users if user in wanted]
    ends = list(accumulate(sizes))
    if not read:
        return None
    found = (ends[min(read)] - sizes[min(read)], ends[max(read)])
    return None if found == (0, width) else found


def _reads(user: fx.Node) -> bool:
    """Whether a reader may ask for the variance: the output does, comparisons and sizes do not."""
    values = user.meta.get("val")
    parts = values if isinstance(values, (tuple, list)) else [values]
    return user.op == "output" or is_float(user) or any(isinstance(v, Tensor) and v.is_complex() for v in parts)


def _width(node: fx.Node) -> Any:
    return (shape_of(node) or (None,))[-1]


def _parts(node: fx.Node, width: Any) -> list[int] | None:
    """Sizes of the parts if the node splits the last dimension."""
    if not isinstance(width, int) or not facts(node.target).splits:
        return None
    source, _, *rest = node.args
    dim: Any = rest[0] if rest else node.kwargs.get("dim", 0)
    if dim not in (-1, len(shape_of(source) or ()) - 1):
        return None
    return [int(part.shape[-1]) for part in node.meta["val"]]
