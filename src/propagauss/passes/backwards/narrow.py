"""Read fewer positions before the last layer instead of after it.

A linear layer treats positions one by one, so `linear(x)[:, -1]` is `linear(x[:, -1])`: language models then compute
the logits of the last token alone, and their last layer has one vector per sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from propagauss.nodes import call, erase
from propagauss.tracing.trace import Traced

aten = torch.ops.aten
_READS = (aten.select.int, aten.slice.Tensor)


def read_before_last_layer(traced: Traced) -> None:
    """Swap, in place, every output that reads a part of a linear layer with that layer."""
    for i, output in enumerate(traced.outputs):
        while isinstance(output, fx.Node) and (moved := _swapped(traced.graph, output)) is not None:
            output.replace_all_uses_with(moved)
            traced.outputs = [moved if o is output else o for o in traced.outputs]
            erase(output)
            output = moved
        traced.outputs[i] = output


def _swapped(graph: fx.Graph, output: fx.Node) -> fx.Node | None:
    """The last layer after what was read of it, all of it new; None if the output is not of that form."""
    reads: list[fx.Node] = []
    node: Any = output
    while isinstance(node, fx.Node) and node.target in _READS and _keeps_last(node) and _is_read_once(node, reads):
        reads.append(node)
        node = node.args[0]
    if not reads or not isinstance(node, fx.Node) or node.target != aten.linear.default or len(node.users) != 1:
        return None
    with graph.inserting_before(output):
        x: Any = node.args[0]
        for read in reversed(reads):
            x = call(graph, read, read.target, x, *read.args[1:], **read.kwargs)
        return call(graph, node, aten.linear.default, x, *node.args[1:], **node.kwargs)


def _keeps_last(read: fx.Node) -> bool:
    """Whether it takes part of another dimension than the last, which is the one that the layer maps."""
    source: Any = read.args[0]
    dim: Any = read.args[1] if len(read.args) > 1 else read.kwargs.get("dim", 0)
    return dim % source.meta["val"].dim() != source.meta["val"].dim() - 1


def _is_read_once(node: fx.Node, after: list[fx.Node]) -> bool:
    return not after or len(node.users) == 1
