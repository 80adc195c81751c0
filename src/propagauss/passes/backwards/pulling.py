"""One step back: from the sensitivity of the result of an op to that of one of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from propagauss.passes.backwards.arguments import has_complex
from propagauss.passes.backwards.new_graph import NewGraph
from propagauss.passes.backwards.samples.axes import PLAIN, Axis, apart, fronted
from propagauss.rules.adjoints.registry import ADJOINTS, PER_SAMPLE, PREPARED, pulled_back, pulled_back_per_sample

aten = torch.ops.aten
# per-sample adjoints that read the last dimension alone, or the trailing ones: samples may be anywhere before them
_ROWS = {aten.linear.default, aten.addmm.default, aten.layer_norm.default, aten.rms_norm.default}


class Pulling:
    """By the adjoint of the op, or by automatic differentiation; `axes` say where values have their samples."""

    def __init__(self, new: NewGraph, axes: Mapping[fx.Node, Axis]):
        self.new, self.axes = new, axes
        self.ready: dict[fx.Node, fx.Node] = {}  # what the adjoints of all arguments of an op need

    def pulled(self, node: fx.Node, g: Any, path: tuple[int, ...], argument: fx.Node) -> fx.Node:
        """The sensitivity of one argument of an op, from that of its result."""
        args, kwargs = map_arg((node.args, node.kwargs), self.new.env.__getitem__)  # type: ignore[misc]
        at: Any = path[0] if len(path) == 1 else path
        y: Any = self.new.env[node]
        op: Any = node.target
        if node in self.axes and argument not in self.axes:
            return self._crossing(node, g, path, args, kwargs)
        found = None if has_complex(node) else ADJOINTS.get(op)  # written for real numbers
        self.new.note(node, "automatic" if found is None else "adjoint")
        if found is not None:
            if op in PREPARED:
                if node not in self.ready:
                    self.ready[node] = self.new.graph.call_function(PREPARED[op], args, kwargs)
                kwargs = kwargs | {"ready": self.ready[node]}
            return self.new.graph.call_function(found, (g, at, y, *args), kwargs)
        return self.new.graph.call_function(pulled_back, (g, path, op, y, *args), kwargs)

    def _crossing(self, node: fx.Node, g: Any, path: tuple[int, ...], args: Any, kwargs: Any) -> fx.Node:
        """From a value with samples to one that all samples share: its sensitivity is kept apart for each of them."""
        op, axis = node.target, self.axes[node]
        inputs = {i: self.axes[a] for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a in self.axes}
        found = None if has_complex(node) else PER_SAMPLE.get(op)
        first = axis == PLAIN
        fits = all(a == axis for a in inputs.values()) and (first or op in _ROWS) if inputs else first
        if found is not None and fits:
            self.new.note(node, "adjoint")
            y, moved = self.new.env[node], list(args)
            if not first:
                g, y = self.new.call(fronted, g, *axis, 1), self.new.call(fronted, y, *axis)
                for i, a in inputs.items():
                    moved[i] = self.new.call(fronted, args[i], *a)
            return self.new.graph.call_function(found, (g, path[0] if len(path) == 1 else path, y, *moved), kwargs)
        self.new.note(node, "automatic")
        moved, dims = zip(*(self._apart(a, v) for a, v in zip(node.args, args, strict=True)), strict=True)
        parts = [None if p is None else self.new.call(apart, p, *axis, 1) for p in g] if isinstance(g, list) else None
        g = self.new.call(apart, g, *axis, 1) if parts is None else parts
        call: Any = (g, path, op, dims, axis.dim, self.new.env[node], *moved)
        return self.new.graph.call_function(pulled_back_per_sample, call, kwargs)

    def _apart(self, argument: Any, value: Any) -> tuple[Any, Any]:
        """An argument with a dimension for samples alone, and which one that is; lists element by element."""
        if isinstance(argument, (list, tuple)):
            pairs = [self._apart(a, v) for a, v in zip(argument, value, strict=True)]
            return [v for v, _ in pairs], [d for _, d in pairs]
        axis = self.axes.get(argument) if isinstance(argument, fx.Node) else None
        return (value, None) if axis is None else (self.new.call(apart, value, *axis), axis.dim)
