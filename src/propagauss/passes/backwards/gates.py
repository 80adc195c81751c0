"""Sensitivities that a layer alone reads are not multiplied by the slopes of the activation behind it.

`(g s) diag(v) (g s)ᵀ = g diag(s² v) gᵀ`, with one slope for every entry of a sample, and `g` as many times that.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from propagauss.rules.adjoints.elementwise import SLOPES, sign
from propagauss.rules.adjoints.forms import DiagonalLayer


def move_gates(graph: fx.Graph, root: nn.Module) -> None:
    """Hand slopes to the layers whose noise they can multiply."""
    for node in list(graph.nodes):
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        gate = node.args[0] if isinstance(module, DiagonalLayer) else None
        if not isinstance(gate, fx.Node) or gate.target not in SLOPES or len(gate.users) > 1:
            continue
        g, _, y, x, *rest = gate.args
        with graph.inserting_before(node):
            factor = graph.call_function(SLOPES[gate.target], (x, y, *rest), gate.kwargs)
            if SLOPES[gate.target] is not sign:  # whose square is itself
                factor = graph.call_function(torch.square, (factor,))
        node.args = (g, *node.args[1:])
        node.kwargs = {"factor": factor}
        graph.erase_node(gate)
