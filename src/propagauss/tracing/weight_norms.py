"""Batch normalisation of a weight, as in weight-standardised convolutions: it mixes no samples.

`batch_norm(w [1, C, L], no statistics)` normalises every row by its own mean and variance, so it is
`layer_norm(w, [L]) * gain + shift`, for which there are rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from propagauss.nodes import argument, call, replace, shape_of

aten = torch.ops.aten


def rows_normalised(program: ExportedProgram, from_input: set[fx.Node]) -> None:
    """Rewrite, in place, batch norms of one "sample" that do not depend on the input (`from_input`: what does)."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target == aten.batch_norm.default and node not in from_input and _normalises_rows(node):
            with graph.inserting_before(node):
                new = _rows(graph, node)
            replace(program, node, new)


def _normalises_rows(node: fx.Node) -> bool:
    shape = shape_of(node) or ()
    fixed = all(isinstance(size, int) for size in shape)
    statistics = argument(node, 3, "running_mean") is not None or argument(node, 4, "running_var") is not None
    return len(shape) >= 3 and fixed and shape[0] == 1 and not statistics


def _rows(graph: fx.Graph, node: fx.Node) -> fx.Node:
    x, eps = node.args[0], argument(node, 7, "eps", 1e-5)
    shape: Any = shape_of(node)
    channels, length = shape[1], torch.Size(shape[2:]).numel()
    x = x if len(shape) == 3 else call(graph, node, aten.reshape.default, x, [1, channels, length])
    new = call(graph, node, aten.layer_norm.default, x, [length], None, None, eps)
    for op, factor in (
        (aten.mul.Tensor, argument(node, 1, "weight")),
        (aten.add.Tensor, argument(node, 2, "bias")),
    ):
        if factor is not None:
            new = call(graph, node, op, new, call(graph, node, aten.reshape.default, factor, [1, channels, 1]))
    return new if len(shape) == 3 else call(graph, node, aten.reshape.default, new, list(shape))
