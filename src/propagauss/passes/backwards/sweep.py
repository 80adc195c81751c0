"""From a traced graph to one that also sends the sensitivities of its outputs backwards.

With `f` the model and `w` its random parameters, `Cov[f] = J Σ Jᵀ` to first order, `J = ∂f/∂w`. The graph that is built
here runs the model once, keeps what its derivatives need, starts with the identity at the output (`g [K, B, ...]`, one
row for every output of a sample) and pulls it back op by op. What arrives at a parameter are the rows of its Jacobian,
sample by sample. The sum of all their quadratic forms is the covariance.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from propagauss.gaussian import Gaussian
from propagauss.nodes import depends, hint, is_assertion, is_float
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.roots import roots
from propagauss.rules.adjoints.registry import ADJOINTS, PER_SAMPLE, pulled_back, pulled_back_per_sample
from propagauss.tracing.trace import Traced


class Sweep:
    """Builds the graph of one forward and one backward walk."""

    def __init__(self, traced: Traced, posterior: Posterior | None, full: bool):
        self.traced, self.posterior, self.full = traced, posterior, full
        self.root, self.graph = nn.Module(), fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.names = set() if posterior is None else set(posterior.names)
        self.leaves: dict[fx.Node, str] = {}  # random parameters
        self.active: set[fx.Node] = set()  # what they reach
        self.batched: set[fx.Node] = set()  # what has samples
        self.sensitivity: dict[fx.Node, Any] = {}

    def run(self) -> fx.GraphModule:
        self._forward()
        results = tuple(self._result(output) for output in self.traced.outputs)
        self.graph.output(results)
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        body = fx.GraphModule(self.root, self.graph, class_name="LinearisedBody")
        body.delete_all_unused_submodules()
        return body

    # -- forwards: the model itself

    def _forward(self) -> None:
        for node, uncertain in zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True):
            if node is not None:
                self.env[node] = self.graph.placeholder(node.name)
                if uncertain:
                    self.active.add(node)
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node.name in self.traced.constants:
                name = f"constant_{node.name}"
                self.root.register_buffer(name, self.traced.constants[node.name].detach().clone())
                self.env[node] = self.graph.get_attr(name)
                parameter = self.traced.parameters.get(node.name)
                if parameter in self.names:
                    self.leaves[node] = parameter  # type: ignore[assignment]
                    self.active.add(node)
            elif node.op == "call_function" and not is_assertion(node.target):
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
                if any(a in self.active for a in node.all_input_nodes) and _has_numbers(node):
                    self.active.add(node)
            if self._axis(node) is not None:
                self.batched.add(node)

    def _axis(self, node: fx.Node) -> tuple[int, int] | None:
        """The dimension that counts samples, and its rows for each sample; None for a value that all samples share."""
        value = node.meta.get("val")
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        for d, size in enumerate(getattr(value, "shape", ())):
            if depends(size, self.traced.batch_symbols):
                return d, max(hint(size) // self.traced.batch, 1)
        if not self.traced.batch_is_dynamic and getattr(value, "dim", lambda: 0)():
            size = hint(value.shape[0])
            if size % self.traced.batch == 0 and node not in self.leaves and node.name not in self.traced.constants:
                return 0, size // self.traced.batch
        return None

    # -- backwards

    def _result(self, output: Any) -> Any:
        if not isinstance(output, fx.Node) or not is_float(output):
            return self.env.get(output, output) if isinstance(output, fx.Node) else output
        if output not in self.active:
            return self.graph.call_function(_certain, (self.env[output], self.full))
        self.sensitivity = {output: self._seed(output)}
        jacobians = self._backward()
        total: Any = None
        if jacobians:
            assert self.posterior is not None
            for names, root in roots(self.posterior, sorted(jacobians)):
                rows = tuple(jacobians[n] for n in names)
                moved = self._emit(f"root_{names[0]}", root, rows)
                form = self.graph.call_function(gram if self.full else squares, (moved,))
                total = form if total is None else self.graph.call_function(operator.add, (total, form))
        make = _full if self.full else _diagonal
        return self.graph.call_function(make, (self.env[output], total))

    def _seed(self, output: fx.Node) -> fx.Node:
        event = [hint(s) for s in output.meta["val"].shape[1:]]
        count = math.prod(event)
        eye = torch.eye(count, dtype=output.meta["val"].dtype).reshape(count, 1, *event)
        name = f"identity_{output.name}"
        self.root.register_buffer(name, eye)
        return self.graph.call_function(_expanded, (self.graph.get_attr(name), self.env[output]))

    def _backward(self) -> dict[str, fx.Node]:
        """The rows of the Jacobian of every random parameter that the output depends on, `[K, B, *shape]`."""
        jacobians: dict[str, fx.Node] = {}
        for node in reversed(list(self.traced.graph.nodes)):
            g = self.sensitivity.pop(node, None)
            if g is None:
                continue
            if node in self.leaves:
                name = self.leaves[node]
                jacobians[name] = g if name not in jacobians else self._sum(jacobians[name], g)
            elif node.target is operator.getitem and isinstance(node.args[0].meta["val"], (tuple, list)):  # type: ignore[union-attr]
                self._put_part(*node.args, g)  # type: ignore[arg-type]
            elif node.op == "call_function":
                self._pull(node, g)
        return jacobians

    def _put_part(self, node: fx.Node, index: int, g: Any) -> None:
        """A part of a result in several parts, whose sensitivities are a list."""
        parts = self.sensitivity.setdefault(node, [None] * len(node.meta["val"]))
        index %= len(parts)
        parts[index] = g if parts[index] is None else self._sum(parts[index], g)

    def _pull(self, node: fx.Node, g: Any) -> None:
        for path, argument in _paths(node):
            if argument in self.active:
                new = self._pulled(node, g, path, argument)
                old = self.sensitivity.get(argument)
                self.sensitivity[argument] = new if old is None else self._sum(old, new)

    def _pulled(self, node: fx.Node, g: Any, path: tuple[int, ...], argument: fx.Node) -> fx.Node:
        y, op = self.env[node], node.target
        args, kwargs = map_arg((node.args, node.kwargs), self.env.__getitem__)  # type: ignore[misc]
        crossing = node in self.batched and argument not in self.batched
        table = PER_SAMPLE if crossing else ADJOINTS
        found = table.get(op)
        at: Any = path[0] if len(path) == 1 else path
        if found is not None:
            return self.graph.call_function(found, (g, at, y, *args), kwargs)
        if not crossing:
            return self.graph.call_function(pulled_back, (g, path, op, y, *args), kwargs)
        batched = tuple(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a in self.batched)
        return self.graph.call_function(pulled_back_per_sample, (g, path, op, batched, y, *args), kwargs)

    def _sum(self, first: fx.Node, second: fx.Node) -> fx.Node:
        return self.graph.call_function(operator.add, (first, second))

    def _emit(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> fx.Node:
        name = name.replace(".", "_")
        self.root.add_module(name, module)
        return self.graph.call_module(name, inputs)


def _has_numbers(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


def _paths(node: fx.Node) -> list[tuple[tuple[int, ...], fx.Node]]:
    """Where the arguments of an op are: positions, also inside lists."""
    found: list[tuple[tuple[int, ...], fx.Node]] = []
    for i, arg in enumerate(node.args):
        if isinstance(arg, fx.Node):
            found.append(((i,), arg))
        elif isinstance(arg, (list, tuple)):
            found.extend(((i, j), a) for j, a in enumerate(arg) if isinstance(a, fx.Node))
    return found


# -- what runs


def _expanded(eye: Tensor, y: Tensor) -> Tensor:
    """The identity for every sample: `[K, B, ...]`."""
    return eye.expand(-1, y.shape[0], *([-1] * (eye.dim() - 2)))


def gram(rows: Tensor) -> Tensor:
    """`[K, B, rank] -> [B, K, K]`"""
    rows = rows.transpose(0, 1)
    return rows @ rows.mT


def squares(rows: Tensor) -> Tensor:
    """`[K, B, rank] -> [B, K]`"""
    return rows.square().sum(-1).mT


def _full(mean: Tensor, covariance: Tensor) -> Gaussian:
    return Gaussian.full(mean, covariance)


def _diagonal(mean: Tensor, variance: Tensor) -> Gaussian:
    return Gaussian.diagonal(mean, variance.reshape(mean.shape))


def _certain(mean: Tensor, full: bool) -> Gaussian:
    zeros = torch.zeros_like(mean)
    return Gaussian.diagonal(mean, zeros)
