"""The graph that a backward walk is written into: the model once more, followed by the ops of its way back."""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor, fx, nn

from propagauss.gaussian import mean_of
from propagauss.network.plan import Step
from propagauss.nodes import depends, hint, is_assertion, module_path, op_name
from propagauss.passes.backwards.arguments import value_type
from propagauss.tracing.trace import Traced


class NewGraph:
    """What is written so far, and the step of the plan for every op whose way back is in it."""

    def __init__(self, traced: Traced):
        self.traced = traced
        self.root, self.graph = nn.Module(), fx.Graph()
        self.env: dict[fx.Node, Any] = {}  # the values of the model
        self.given: dict[fx.Node, fx.Node] = {}  # its uncertain inputs
        self.seeds: dict[int, fx.Node] = {}  # where the walk from an output starts
        self.steps: dict[fx.Node, Step] = {}

    def copy_model(self, active: AbstractSet[fx.Node]) -> None:
        """The model itself; `active` are the values that are uncertain."""
        for node in self.traced.inputs:
            if node is not None:
                self.env[node] = self.graph.placeholder(node.name)
        self.given = {n: v for n, v in self.env.items() if n in active}
        uncertain = [i for i, o in enumerate(self.traced.outputs) if o in active]
        self.seeds = {i: self.graph.placeholder(f"identity_{i}") for i in uncertain}
        for node, value in self.given.items():
            self.env[node] = self.graph.call_function(mean_of, (value,))
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node.name in self.traced.constants:
                name = f"constant_{node.name}"
                self.root.register_buffer(name, self.traced.constants[node.name].detach().clone())
                self.env[node] = self.graph.get_attr(name)
            elif node.op == "call_function" and not is_assertion(node.target):
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)

    def in_type_of(self, wanted: fx.Node, source: fx.Node, value: fx.Node) -> fx.Node:
        """A value with the type of one node in that of another: models compute some steps in a type of their own."""
        to = value_type(wanted)
        return value if value_type(source) == to else self.graph.call_method("to", (value, to))

    def call(self, function: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(function, args)

    def sum(self, first: fx.Node, second: fx.Node) -> fx.Node:
        return self.graph.call_function(operator.add, (first, second))

    def emit(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> fx.Node:
        name = name.replace(".", "_")
        while hasattr(self.root, name):
            name += "_"
        self.root.add_module(name, module)
        return self.graph.call_module(name, inputs)

    def note(self, node: fx.Node, how: str) -> None:
        value = node.meta.get("val")
        shape: tuple[int | str, ...] = ()
        if isinstance(value, Tensor):
            shape = tuple("B" if depends(s, self.traced.batch_symbols) else hint(s) for s in value.shape)
        notes = {
            "automatic": "exact to first order, by automatic differentiation",
            "layer": "exact to first order, all of its weights at once",
        }
        note = notes.get(how, "exact to first order")
        self.steps.setdefault(node, Step(op_name(node.target), module_path(node), how, "none", shape, note))
