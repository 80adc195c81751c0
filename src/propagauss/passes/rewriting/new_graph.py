"""The graph that is being built: what stands in it for each value of the traced one."""

from __future__ import annotations

import inspect
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from propagauss.gaussian import mean_of
from propagauss.nodes import hint, is_transpose, shape_of
from propagauss.passes.fusion import cut, is_pointwise
from propagauss.passes.sample_mixing import samples_of
from propagauss.posteriors.base import Posterior
from propagauss.rules.derivatives.jacobian import Piece
from propagauss.rules.elementwise.activation import MomentMatched
from propagauss.rules.facts import stride_free
from propagauss.rules.registry import Options, Weight, arguments
from propagauss.rules.wrapping import RandomParameter
from propagauss.tracing.trace import Traced

Moments = tuple[MomentMatched, tuple[Any, ...]]  # a module, and the nodes that it is called with


class NewGraph:
    """Nodes of the new graph for those of the traced one, and what is known of each: sets of nodes of the source."""

    def __init__(
        self, traced: Traced, posterior: Posterior | None, options: Options, wanted: AbstractSet[fx.Node] = frozenset()
    ):
        self.traced, self.posterior, self.options, self.wanted = traced, posterior, options, wanted
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.random: set[fx.Node] = set()  # uncertain
        self.static: set[fx.Node] = set()  # made of constants alone
        self.unbatched: set[fx.Node] = set()  # random parameters, and what is made of them alone
        self.virtual: set[fx.Node] = set()  # uncertain, but no Gaussian: complex values, results in several parts
        self.built: set[fx.Node] = set()  # by rules that know the parameters of their layer
        self.moments: dict[fx.Node, Moments] = {}  # of functions whose moments are matched
        self.alone: set[str] = set()  # parameters that enter by their variances, as in no layer

    def value(self, node: fx.Node) -> Any:
        """The node that stands for `node`; constants and random parameters enter the graph when first used."""
        if node not in self.env:
            if node in self.virtual:
                raise AssertionError(f"{node} is no Gaussian")
            if node in self.random:
                self.env[node] = self._random_parameter(node)
            else:
                value = self.constant(node)
                if not isinstance(value, Tensor):
                    return value  # a size
                self.env[node] = self.graph.get_attr(self._add_buffer(node.name, value))
        return self.env[node]

    def plain(self, node: fx.Node) -> Any:
        """The node for the mean of an uncertain value, or for a plain value itself."""
        if node not in self.random:
            return self.value(node)
        if node.name in self.traced.constants:
            return self.graph.get_attr(self._add_buffer(node.name, self.traced.constants[node.name]))
        if node in self.virtual:
            if node not in self.env:
                self.env[node] = self.copied(node)
            return self.env[node]
        return self.graph.call_function(mean_of, (self.value(node),))

    def _random_parameter(self, node: fx.Node) -> fx.Node:
        assert self.posterior is not None
        name = self.traced.parameters[node.name]
        mean = self.traced.constants[node.name]
        if self.options.full:
            leaf = RandomParameter(mean, None, self.posterior.covariance(name))
        else:
            self.alone.add(name)
            leaf = RandomParameter(mean, self.posterior.variance(name).reshape(mean.shape), None)
        return self.emit(node.name, leaf)

    def constant(self, arg: Any) -> Any:
        """Value of a node that depends on constants only (None otherwise)."""
        if not isinstance(arg, fx.Node):
            return arg if isinstance(arg, Tensor) else None
        if arg not in self.static:
            return None
        if arg.op == "placeholder":
            return self.traced.constants[arg.name]
        op: Any = arg.target
        args: Any = map_arg(arg.args, self.constant)
        kwargs: Any = map_arg(arg.kwargs, self.constant)
        return op(*args, **kwargs)

    def weight(self, arg: Any) -> Weight | None:
        value = self.constant(arg)
        if isinstance(value, Tensor):
            return Weight(value, None, False)
        transposed = False
        while isinstance(arg, fx.Node) and is_transpose(arg):
            arg, transposed = arg.args[0], not transposed
        if not isinstance(arg, fx.Node) or arg.name not in self.traced.parameters or arg not in self.random:
            return None
        tensor = self.traced.constants[arg.name]
        return Weight(tensor.t() if transposed else tensor, self.traced.parameters[arg.name], transposed)

    def _add_buffer(self, name: str, value: Tensor) -> str:
        name = f"constant_{name}"
        if not hasattr(self.root, name):
            self.root.register_buffer(name, value.detach().clone())
        return name

    def emit(self, name: str, module: nn.Module, inputs: tuple[Any, ...] = ()) -> fx.Node:
        """Call a module at run time."""
        name = f"{name}_rule"
        self.root.add_module(name, module)
        return self.graph.call_module(name, inputs)

    def emit_built(self, name: str, target: Any, inputs: tuple[Any, ...]) -> fx.Node:
        """Call what a builder made, a module or a function; tensors among the inputs become buffers."""
        values = []
        names = list(inspect.signature(target.forward if isinstance(target, nn.Module) else target).parameters)
        for i, value in enumerate(inputs):
            if isinstance(value, Tensor):
                buffer = f"{name}_{names[min(i, len(names) - 1)]}"
                self.root.register_buffer(buffer, value)
                values.append(self.graph.get_attr(buffer))
            else:
                values.append(map_arg(value, self.value))
        if isinstance(target, nn.Module):
            return self.emit(name, target, tuple(values))
        return self.graph.call_function(target, tuple(values))

    def copied(self, node: fx.Node) -> fx.Node:
        """The same op, on means."""
        new = self.graph.node_copy(node, self.plain)
        if node.op == "call_function":  # a mean may be laid out in memory unlike the model's own value
            new.target = stride_free(node.target)
        return new

    # -- ops as functions of uncertain values

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nearest uncertain values that are Gaussians."""
        found: dict[fx.Node, None] = {}
        for a in arguments(node):
            if a in self.virtual or (a in self.random and isinstance(a.meta.get("val"), (tuple, list))):
                found.update(dict.fromkeys(self.sources(a)))
            elif a in self.random:
                found[a] = None
        return list(found)

    def piece(self, node: fx.Node) -> tuple[Piece, list[fx.Node]]:
        """The op of a node, with what it reads that is no Gaussian, as a function of `sources(node)`."""
        sources = self.sources(node)
        function, extras = cut(node, sources, self.random)
        return self.piece_from(node, sources, function), extras

    def piece_from(self, node: fx.Node, sources: list[fx.Node], function: fx.GraphModule) -> Piece:
        has_batch = node not in self.unbatched
        pointwise = len(sources) == 1 and shape_of(sources[0]) == shape_of(node)
        pointwise = pointwise and all(is_pointwise(n.target) for n in function.graph.nodes if n.op == "call_function")
        batched = [s not in self.unbatched for s in sources]
        return Piece(function, batched, has_batch, samples_of(node, self.traced), pointwise)

    def entries(self, node: fx.Node) -> int:
        """Of one sample."""
        total = torch.Size(hint(s) for s in node.meta["val"].shape).numel()
        return total if node in self.unbatched else max(total // self.traced.batch, 1)
