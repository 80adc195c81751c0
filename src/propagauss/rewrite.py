"""The walk over a traced graph that builds the streamlined one: only what is downstream of uncertainty is rewritten."""

from __future__ import annotations

import inspect
import operator
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from propagauss.demand import wanted
from propagauss.errors import UnsupportedOpError
from propagauss.fuse import Chains, is_affine, is_pointwise, region
from propagauss.gaussian import mean_of
from propagauss.graph import (
    depends,
    dtype_of,
    hint,
    is_assertion,
    is_float,
    is_transpose,
    module_path,
    nodes_in,
    op_name,
    shape_of,
)
from propagauss.mixing import mixes_samples
from propagauss.network import Streamlined
from propagauss.patterns import AT_MEAN
from propagauss.plan import Plan, Step
from propagauss.posterior.base import Posterior
from propagauss.rules.activation import CLOSED, elementwise
from propagauss.rules.registry import BUILDERS, FUNCTIONS, Built, Options, Weight
from propagauss.rules.shape import STRIDE_FREE
from propagauss.rules.wrapping import (
    Delta,
    InputStructure,
    LinearisedRegion,
    ParameterRegion,
    Pointwise,
    RandomParameter,
    to_gaussian,
)
from propagauss.site import SiteOf
from propagauss.trace import Traced

aten = torch.ops.aten
# ops whose rules broadcast an unbatched random parameter against samples themselves
BROADCASTING = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar, aten.where.self),
    *(aten.prelu.default, aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default),
    *(aten.group_norm.default, aten.instance_norm.default),
}


class Rewriter:
    """Walks the traced graph once and builds the new one. `random` holds the source nodes that are uncertain."""

    def __init__(self, traced: Traced, posterior: Posterior | None, options: Options):
        self.traced, self.posterior, self.options = traced, posterior, options
        self.names = set() if posterior is None else set(posterior.names)
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.random: set[fx.Node] = set()
        self.static: set[fx.Node] = set()
        self.from_means: set[fx.Node] = set()  # plain values that stand for uncertain ones
        self.unbatched: set[fx.Node] = set()  # random parameters, and what is made of them alone
        self.wanted = wanted(traced.graph, traced.outputs)
        self.chains = Chains(any_op=options.full and options.activation == "linearise")
        self.steps: list[tuple[fx.Node, Step]] = []
        self.unsupported: list[tuple[fx.Node, str]] = []

    # -- the walk

    def run(self) -> Streamlined:
        for node, uncertain in zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True):
            if node is not None:
                self._input(node, uncertain)
        for node in self.traced.graph.nodes:
            if node.op == "placeholder" and node.name in self.traced.constants:
                self._constant_placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op not in ("placeholder", "output"):
                self.unsupported.append((node, "is not a plain call"))
        if self.unsupported:
            raise self._unsupported_error()
        self.graph.output(tuple(self._output(o) for o in self.traced.outputs))
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        body = fx.GraphModule(self.root, self.graph, class_name="StreamlinedBody")
        body.delete_all_unused_submodules()
        return Streamlined(body, self._plan(), self.traced).eval()

    def _input(self, node: fx.Node, uncertain: bool) -> None:
        new = self.graph.placeholder(node.name)
        if uncertain:
            name = self._add_module("input", InputStructure(self.options.full))
            new = self.graph.call_module(name, (new,))
            self.random.add(node)
            self.chains.start(node)
        self.env[node] = new

    def _constant_placeholder(self, node: fx.Node) -> None:
        if self.traced.parameters.get(node.name) in self.names:
            self.random.add(node)
            self.unbatched.add(node)
            self.chains.start(node)
        else:
            self.static.add(node)

    def _call(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        random = [a for a in inputs if a in self.random]
        if not random:
            if inputs and all(a in self.static for a in inputs):
                self.static.add(node)
            elif not is_assertion(node.target):
                self.env[node] = self._copy(node)
                if any(a in self.from_means for a in inputs):
                    self._remember_mean(node)
        elif is_assertion(node.target):
            return
        elif not is_float(node) or node not in self.wanted:
            self._by_mean(node)
        else:
            self._rewrite(node, random)

    def _by_mean(self, node: fx.Node) -> None:
        """Sizes, comparisons, and what only attention weights depend on: computed from means, then deterministic."""
        if node.target is operator.getitem and node.args[0] in self.random:
            part = self.graph.node_copy(node, self._value)
            self.env[node] = self.graph.call_function(mean_of, (part,))
            return
        self.env[node] = self._copy(node)
        self._remember_mean(node)
        if isinstance(node.meta.get("val"), Tensor) and not is_float(node):
            self._note(node, "by mean", "decided by the mean, deterministic from here on")

    def _remember_mean(self, node: fx.Node) -> None:
        """A plain value that stands for an uncertain one; where it becomes attention weights, the plan says so."""
        self.from_means.add(node)
        if node.meta.get(AT_MEAN):
            self._note(node, "by mean", "attention weights at the mean of queries and keys")

    def _copy(self, node: fx.Node) -> fx.Node:
        """The same op, on means."""
        new = self.graph.node_copy(node, lambda a: self._mean(a) if a in self.random else self._value(a))
        if node.target in STRIDE_FREE:  # a mean may be laid out in memory unlike the model's own value
            op: Any = node.target
            new.target = STRIDE_FREE[op]  # pyright: ignore[reportAttributeAccessIssue]
        return new

    def _rewrite(self, node: fx.Node, random: list[fx.Node]) -> None:
        weights = [a for a in random if a.op == "placeholder" and a.name in self.traced.constants]
        source = None
        if weights and self.options.full and not (len(random) == 1 and is_pointwise(node.target)):
            self.chains.start(node)  # a parameter has no batch: a function of it and of samples is not one region
        else:
            source = self.chains.link(node, random)
        self.random.add(node)
        if self.options.full:
            self._check_full(node, random)
            if all(r in self.unbatched for r in random) and not self._is_batched(node):
                self.unbatched.add(node)
        if source is not None and sum(n in self.random for n in nodes_in((node.args, node.kwargs))) > 1:
            self._fused(node, source)
        elif self._lifts_parameter(node, random):
            self._lift(node, random[0])
        elif not self._build(node) and not self._apply_function(node) and not self._pointwise(node, random):
            self.unsupported.append((node, "has no rule"))
            self.env[node] = self.graph.placeholder(node.name)  # never run: an error is on its way

    def _is_batched(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        first = value[0] if isinstance(value, (tuple, list)) else value
        return any(depends(s, self.traced.batch_symbols) for s in getattr(first, "shape", ()))

    def _lifts_parameter(self, node: fx.Node, random: list[fx.Node]) -> bool:
        """Whether a random parameter alone becomes part of every sample, other than in a layer or by broadcasting."""
        if not self.options.full or random[0] not in self.unbatched or len(random) > 1 or not self._is_batched(node):
            return False
        layer = node.target in BUILDERS and self.weight(random[0]) is not None and node.target != aten.matmul.default
        return not (layer or node.target in BROADCASTING or is_pointwise(node.target)) or (
            node.target == aten.matmul.default and not self._is_weight_of_matmul(node, random[0])
        )

    def _is_weight_of_matmul(self, node: fx.Node, parameter: fx.Node) -> bool:
        if node.args[1] is not parameter or len(shape_of(parameter) or ()) != 2:
            return False
        return len(shape_of(node.args[0]) or ()) > 1

    # -- the ways to rewrite one op

    def _lift(self, node: fx.Node, parameter: fx.Node) -> None:
        function, extras = region(node, parameter, self.random)
        module = ParameterRegion(function)
        inputs = (self._value(parameter), *(self._value(e) for e in extras))
        self.env[node] = self.graph.call_module(self._add_module(node.name, module), inputs)
        self._note(node, "of a parameter", "linear in the parameter: exact")

    def _fused(self, node: fx.Node, source: fx.Node) -> None:
        function, extras = region(node, source, self.random)
        pointwise = all(is_pointwise(n.target) for n in function.graph.nodes if n.op == "call_function")
        label = f"fused {'elementwise' if pointwise else 'function'} of {source.name}"
        if pointwise:
            module = elementwise(function, self.options.activation, dtype_of(node), graph=function)
            note = self._activation_note()
        else:
            affine = is_affine(node, source, self.random)
            module = LinearisedRegion(function, affine)
            note = "exact" if affine else "linearised as a whole"
        self.env[node] = self.graph.call_module(
            self._add_module(node.name, module), (self._value(source), *(self._value(e) for e in extras))
        )
        self._note(node, label, note)

    def _build(self, node: fx.Node) -> bool:
        for build in reversed(BUILDERS.get(node.target, [])):
            site: Any = SiteOf(self, node)
            built: Built | None = build(site)
            if built is not None:
                self.env[node] = self._emit(node, built.target, built.inputs)
                label = type(built.target).__name__ if isinstance(built.target, nn.Module) else built.target.__name__
                self._note(node, label, built.note)
                return True
        return False

    def _emit(self, node: fx.Node, target: Any, inputs: tuple[Any, ...]) -> fx.Node:
        """Call a module or a function at run time; tensors among the inputs become buffers."""
        values = []
        names = list(inspect.signature(target.forward if isinstance(target, nn.Module) else target).parameters)
        for i, value in enumerate(inputs):
            if isinstance(value, Tensor):
                name = f"{node.name}_{names[min(i, len(names) - 1)]}"
                self.root.register_buffer(name, value)
                values.append(self.graph.get_attr(name))
            else:
                values.append(self._map(value))
        if isinstance(target, nn.Module):
            return self.graph.call_module(self._add_module(node.name, target), tuple(values))
        return self.graph.call_function(target, tuple(values))

    def _apply_function(self, node: fx.Node) -> bool:
        found = FUNCTIONS.get(node.target)
        if found is None:
            return False
        self.env[node] = self.graph.call_function(found.function, self._map(node.args), self._map(node.kwargs))
        if node.target is not operator.getitem:
            self._note(node, found.function.__name__, found.note)
        return True

    def _pointwise(self, node: fx.Node, random: list[fx.Node]) -> bool:
        if not is_pointwise(node.target):
            return False
        if len(random) > 1 or random[0] not in node.args or shape_of(random[0]) != shape_of(node):
            return self._delta(node)
        at = node.args.index(random[0])
        closed = CLOSED.get(node.target)
        if closed is not None and at == 0 and self.options.activation == "linearise":
            self.env[node] = self.graph.call_function(closed, self._map(node.args), self._map(node.kwargs))
            self._note(node, "elementwise", self._activation_note())
            return True
        graph, extras = region(node, random[0], self.random)
        if extras:
            module = elementwise(graph, self.options.activation, dtype_of(node), graph=graph)
        else:
            function = Pointwise(node.target, at, node.args, node.kwargs)
            op = node.target if at == 0 else None
            settings = (node.args[1:], node.kwargs)
            module = elementwise(function, self.options.activation, dtype_of(node), op, settings, graph)
        inputs = (self._value(random[0]), *(self._value(e) for e in extras))
        self.env[node] = self.graph.call_module(self._add_module(node.name, module), inputs)
        self._note(node, "elementwise", self._activation_note())
        return True

    def _delta(self, node: fx.Node) -> bool:
        if node.kwargs:
            return False
        name = self._add_module(node.name, Delta(node.target))
        self.env[node] = self.graph.call_module(name, self._map(node.args))
        self._note(node, "delta", "linearised in each argument, arguments independent")
        return True

    # -- values in the new graph

    def _map(self, args: Any) -> Any:
        return map_arg(args, self._value)

    def _value(self, node: fx.Node) -> Any:
        """The node that stands for `node`; constants and random parameters enter the graph when first used."""
        if node not in self.env:
            if node in self.random:
                self.env[node] = self._random_parameter(node)
            else:
                value = self.constant(node)
                if not isinstance(value, Tensor):
                    return value  # a size
                self.env[node] = self.graph.get_attr(self._add_buffer(node.name, value))
        return self.env[node]

    def _mean(self, node: fx.Node) -> fx.Node:
        if node.name in self.traced.constants:
            return self.graph.get_attr(self._add_buffer(node.name, self.traced.constants[node.name]))
        return self.graph.call_function(mean_of, (self._value(node),))

    def _random_parameter(self, node: fx.Node) -> fx.Node:
        assert self.posterior is not None
        name = self.traced.parameters[node.name]
        mean = self.traced.constants[node.name]
        if self.options.full:
            leaf = RandomParameter(mean, None, self.posterior.covariance(name))
        else:
            leaf = RandomParameter(mean, self.posterior.variance(name).reshape(mean.shape), None)
        return self.graph.call_module(self._add_module(node.name, leaf))

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
        self.root.register_buffer(name, value.detach().clone())
        return name

    def _add_module(self, name: str, module: nn.Module) -> str:
        name = f"{name}_rule"
        self.root.add_module(name, module)
        return name

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        new = self._value(value)
        if value in self.random or not is_float(value):
            return new
        return self.graph.call_function(to_gaussian, (new,))

    # -- checks and words

    def _check_full(self, node: fx.Node, random: list[fx.Node]) -> None:
        """Collect what the full structure cannot represent."""
        batched = [r for r in random if r not in self.unbatched]
        if not batched:
            return
        if mixes_samples(node, batched, self.traced.batch):
            self.unsupported.append((node, "mixes the samples of a batch, or moves the batch away from the front"))
        elif len(random) > 1 and node.target == aten.einsum.default:
            self.unsupported.append((node, "has two uncertain operands, for which full covariance has no rule"))
        elif len(batched) < len(random) and not self._combines(node, batched):
            self.unsupported.append((node, "combines a random parameter with an uncertain value: no full covariance"))

    def _combines(self, node: fx.Node, batched: list[fx.Node]) -> bool:
        """Whether a rule covers a parameter and a batched value together: layers, and whatever broadcasts."""
        if node.target == aten.matmul.default:
            return node.args[0] in batched and len(shape_of(node.args[1]) or ()) == 2
        return node.target in BUILDERS or node.target in BROADCASTING or is_pointwise(node.target) or _joins(node)

    def _note(self, node: fx.Node, rule: str, note: str) -> None:
        value = node.meta.get("val")
        shape: tuple[int | str, ...] = ()
        if isinstance(value, Tensor):
            shape = tuple("B" if depends(s, self.traced.batch_symbols) else hint(s) for s in value.shape)
        elif isinstance(value, (tuple, list)):
            shape = (f"{len(value)} parts",)
        structure = "none" if rule == "by mean" else self.options.covariance
        step = Step(op_name(node.target), module_path(node), rule, structure, shape, note)
        self.steps.append((node, step))
        self.env[node].meta["step"] = step

    def _activation_note(self) -> str:
        return "linearised" if self.options.activation == "linearise" else "first two moments matched"

    def _plan(self) -> Plan:
        live = set(self.graph.nodes)
        steps = tuple(step for node, step in self.steps if self.env[node] in live)
        rewritten = {self.env[node] for node, _ in self.steps}
        own = [n for n in self.env if n.op == "call_function" and n not in self.random]
        untouched = sum(self.env[n] in live and self.env[n] not in rewritten for n in own)
        used = {self.traced.parameters[n.name] for n in self.random if n.name in self.traced.parameters and n.users}
        idle = {self.traced.parameters[n.name] for n in self._idle_parameters()}
        unused = sorted(self.names - used)
        if unused:
            warnings.warn(f"the model never uses these parameters of the posterior: {', '.join(unused)}", stacklevel=4)
        notes = []
        if idle:
            notes.append(f"no effect, as attention takes queries and keys by their mean: {', '.join(sorted(idle))}")
        return Plan(steps, untouched, tuple(sorted(used - idle)), tuple(notes))

    def _idle_parameters(self) -> list[fx.Node]:
        """Random parameters whose spread reaches nothing."""
        leaves = [n for n in self.random if n.name in self.traced.parameters and n.users]
        return [n for n in leaves if not any(user in self.wanted for user in n.users)]

    def _unsupported_error(self) -> UnsupportedOpError:
        lines = [f"  {op_name(n.target)} at '{module_path(n)}' {why}" for n, why in dict(self.unsupported).items()]
        remedy = (
            "covariance='diagonal' has no such limit."
            if any(why != "has no rule" for _, why in self.unsupported)
            else "Register a rule with @propagauss.rule(torch.ops....) (see the how-to on custom rules), or leave the "
            "parameters before these ops out of the posterior."
        )
        return UnsupportedOpError("cannot streamline this model:\n" + "\n".join(lines) + "\n" + remedy)


def _joins(node: fx.Node) -> bool:
    return node.target in (aten.cat.default, aten.stack.default)
