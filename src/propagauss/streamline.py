"""Model + posterior -> one deterministic module that maps an input to the mean and covariance of the output."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from propagauss import rules  # noqa: F401 (registers the built-in rules)
from propagauss.errors import InputError, UnsupportedOpError
from propagauss.fuse import Chains, is_affine, is_pointwise, region
from propagauss.gaussian import Gaussian
from propagauss.plan import Plan, Step
from propagauss.posterior.base import Posterior
from propagauss.rules.activation import CLOSED, elementwise
from propagauss.rules.arithmetic import delta
from propagauss.rules.registry import BUILDERS, FUNCTIONS, Built, Options, Weight
from propagauss.trace import Traced, as_call, flatten, module_path, op_name, trace

aten = torch.ops.aten
_CHOICES = {
    "covariance": ("diagonal", "full"),
    "activation": ("linearise", "moments"),
    "attention": ("variance", "covariance"),
}


def streamline(
    model: nn.Module,
    posterior: Posterior | None,
    example: Any,
    *,
    covariance: Literal["diagonal", "full"] = "diagonal",
    activation: Literal["linearise", "moments"] = "linearise",
    attention: Literal["variance", "covariance"] = "variance",
) -> Streamlined:
    """Rewrite a trained model and a posterior over its parameters into a module that propagates Gaussians.

    Args:
        model: any module that `torch.export` can trace, in evaluation mode; it is read, never changed.
        posterior: over any of its named parameters (the others are deterministic); None for none at all.
        example: an input the model accepts: a tensor, a tuple (positional) or a dict (keyword arguments). Give a
            `Gaussian` in place of a tensor for an input that will be uncertain. The batch size does not matter.
        covariance: keep variances only, or the joint covariance of all entries of a sample (quadratic in their number).
        activation: linearise elementwise functions at the mean, or match their first two moments.
        attention: keep variances of attention values only, or their covariance within a head.
    """
    options = Options(covariance, activation, attention)
    for name, allowed in _CHOICES.items():
        if getattr(options, name) not in allowed:
            raise InputError(f"{name} is {getattr(options, name)!r}; it must be one of {', '.join(map(repr, allowed))}")
    if not isinstance(model, nn.Module):
        raise InputError(f"streamline needs an nn.Module, got {type(model).__name__}")
    if posterior is not None:
        posterior = posterior.bind({name: p.detach() for name, p in model.named_parameters()})
    traced = trace(model, example)
    return _Rewriter(traced, posterior, options).run()


class Streamlined(nn.Module):
    """A streamlined network: `net(x)` is the `Gaussian` at the model's output.

    Every floating-point output of the model becomes a Gaussian (of zero variance where nothing random reaches it), in
    the structure the model returns. `net.plan` says what happens at each op, `net.code` is the generated forward.
    """

    def __init__(self, body: fx.GraphModule, plan: Plan, traced: Traced):
        super().__init__()
        self.body = body
        self.plan = plan
        self._in_spec = traced.in_spec
        self._out_spec = traced.out_spec
        self._used = [node is not None for node in traced.inputs]
        self._kinds = [
            ("Gaussian" if uncertain else "tensor", x.dtype) if isinstance(x, Tensor) else None
            for x, uncertain in zip(traced.example, traced.uncertain_inputs, strict=True)
        ]
        self._fixed_batch = None if traced.batch_is_dynamic else traced.batch
        self._single = len(self._kinds) == 1 and self._in_spec == flatten((torch.zeros(1),), {})[1]
        self._single_output = traced.out_spec.is_leaf()

    @property
    def code(self) -> str:
        return self.body.code

    @property
    def graph(self) -> fx.Graph:
        return self.body.graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._single and len(args) == 1 and not kwargs:
            leaves: list[Any] = [args[0]]
            self._check(0, args[0])
        else:
            leaves = self._flatten(args, kwargs)
        outputs = self.body.forward(*leaves)
        return outputs[0] if self._single_output else pytree.tree_unflatten(outputs, self._out_spec)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = flatten(args, kwargs)
        if spec != self._in_spec and len(args) == 1 and not kwargs:
            leaves, spec = flatten(*as_call(args[0]))
        if spec != self._in_spec:
            raise InputError(f"this network was streamlined for inputs of the form {self._in_spec}, got {spec}")
        for i, leaf in enumerate(leaves):
            self._check(i, leaf)
        return [leaf for leaf, used in zip(leaves, self._used, strict=True) if used]

    def _check(self, i: int, leaf: Any) -> None:
        kind = self._kinds[i]
        if kind is None:
            return
        form, dtype = kind
        if form == "Gaussian" and not isinstance(leaf, Gaussian):
            raise InputError(
                f"input {i} was a Gaussian when the network was streamlined, but is a {type(leaf).__name__}: pass "
                "pg.Gaussian(x, variance=...), or streamline again with a plain example"
            )
        if form == "tensor" and not isinstance(leaf, Tensor):
            raise InputError(
                f"input {i} was a plain tensor when the network was streamlined, but is a {type(leaf).__name__}: "
                "pass a tensor, or streamline again with a Gaussian as the example"
            )
        if leaf.dtype != dtype:
            raise InputError(
                f"input {i} is {leaf.dtype}; the network was streamlined for {dtype}: convert it with .to()"
            )
        if self._fixed_batch is not None and leaf.shape and leaf.shape[0] != self._fixed_batch:
            raise InputError(
                f"the model fixes its batch size, so this network takes batches of {self._fixed_batch}, not {leaf.shape[0]}"
            )

    def __repr__(self) -> str:
        return f"Streamlined({len(self.plan)} rewritten ops, {len(self.plan.parameters)} random parameters)"


class RandomParameter(nn.Module):
    """A random parameter that is used on its own, outside a linear layer."""

    def __init__(self, mean: Tensor, variance: Tensor | None, covariance: Tensor | None):
        super().__init__()
        self.register_buffer("mean", mean.clone())
        self.register_buffer("spread", (variance if covariance is None else covariance.unsqueeze(0)).clone())  # type: ignore[union-attr]
        self.is_full = covariance is not None

    def forward(self) -> Gaussian:
        build = Gaussian.full if self.is_full else Gaussian.diagonal
        return build(self.mean, self.spread)  # type: ignore[arg-type]


class InputStructure(nn.Module):
    """Brings an uncertain input into the structure that the network carries."""

    def __init__(self, full: bool):
        super().__init__()
        self.is_full = full

    def forward(self, x: Gaussian) -> Gaussian:
        return Gaussian.full(x.mean, x.covariance) if self.is_full else Gaussian.diagonal(x.mean, x.variance)


class LinearisedRegion(nn.Module):
    """Any deterministic function `f` of one Gaussian: `J C Jᵀ`, rows of `C` pushed through by forward derivatives.

    An affine function needs none: `J t = f(t) - f(0)`.
    """

    def __init__(self, function: nn.Module, affine: bool):
        super().__init__()
        self.function = function
        self.affine = affine

    def forward(self, x: Gaussian, *extras: Any) -> Gaussian:
        def f(t: Tensor) -> Tensor:
            return self.function(t, *extras)

        if self.affine:
            offset = f(torch.zeros_like(x.mean))
            return x.mapped(f(x.mean), lambda t: f(t) - offset)
        return x.mapped(f(x.mean), lambda t: torch.func.jvp(f, (x.mean,), (t,))[1])


class Pointwise(nn.Module):
    """One elementwise op as a function of its uncertain argument, the other arguments filled in."""

    def __init__(self, op: Any, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.op, self.at, self.args, self.kwargs = op, at, args, kwargs
        self.alone = at == 0 and len(args) == 1 and not kwargs

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        if self.alone:
            return self.op(x)
        args = list(self.args)
        args[self.at] = x
        return self.op(*args, **self.kwargs)


def to_gaussian(x: Tensor) -> Any:
    """A deterministic output as a Gaussian of zero variance."""
    return Gaussian.diagonal(x, torch.zeros_like(x))


@dataclass(frozen=True)
class _Site:
    """What a builder may ask; see `rules.registry.Site`."""

    rewriter: _Rewriter
    node: fx.Node

    @property
    def op(self) -> Any:
        return self.node.target

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.node.kwargs

    @property
    def options(self) -> Options:
        return self.rewriter.options

    @property
    def posterior(self) -> Posterior | None:
        return self.rewriter.posterior

    def is_random(self, arg: Any) -> bool:
        return any(a in self.rewriter.random for a in _nodes(arg))

    def constant(self, arg: Any) -> Tensor | None:
        return self.rewriter.constant(arg)

    def weight(self, arg: Any) -> Weight | None:
        return self.rewriter.weight(arg)

    def shape(self, arg: Any) -> torch.Size:
        return torch.Size(_hint(s) for s in arg.meta["val"].shape)

    def positions(self, arg: Any) -> int:
        return self.shape(arg)[:-1].numel() // self.rewriter.traced.batch


class _Rewriter:
    """Walks the traced graph once and builds the new one. `random` holds the source nodes that are uncertain."""

    def __init__(self, traced: Traced, posterior: Posterior | None, options: Options):
        self.traced, self.posterior, self.options = traced, posterior, options
        self.names = set() if posterior is None else set(posterior.names)
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.random: set[fx.Node] = set()
        self.static: set[fx.Node] = set()
        self.chains = Chains(any_op=options.full and options.activation == "linearise")
        self.steps: list[tuple[fx.Node, Step]] = []
        self.unsupported: list[tuple[fx.Node, str]] = []
        self.untouched = 0
        self.counts: dict[str, int] = {}

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
            self.chains.start(node)
        else:
            self.static.add(node)

    def _call(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        random = [a for a in inputs if a in self.random]
        if not random:
            if inputs and all(a in self.static for a in inputs):
                self.static.add(node)
            elif not _is_assertion(node.target):
                self.env[node] = self.graph.node_copy(node, self._value)
                self.untouched += 1
        elif _is_assertion(node.target):
            return
        elif not _is_float(node):
            self._by_mean(node)
        else:
            self._rewrite(node, random)

    def _by_mean(self, node: fx.Node) -> None:
        """Sizes, comparisons and indices are read off the mean, and are deterministic from there on."""
        self.env[node] = self.graph.node_copy(node, lambda a: self._mean(a) if a in self.random else self._value(a))
        if isinstance(node.meta.get("val"), Tensor):
            self._note(node, "by mean", "decided by the mean, deterministic from here on")
        else:
            self.untouched += 1

    def _rewrite(self, node: fx.Node, random: list[fx.Node]) -> None:
        weights = [a for a in random if a.op == "placeholder" and a.name in self.traced.constants]
        if weights:
            self.chains.start(node)
            source = None
        else:
            source = self.chains.link(node, random)
        self.random.add(node)
        if self.options.full:
            self._check_batch(node, random, weights)
        if source is not None and sum(n in self.random for n in _nodes((node.args, node.kwargs))) > 1:
            self._fused(node, source)
        elif not self._build(node) and not self._apply_function(node) and not self._pointwise(node, random):
            self.unsupported.append((node, "has no rule"))
            self.env[node] = self.graph.call_function(node.target)  # never run: an error is on its way

    # -- the ways to rewrite one op

    def _fused(self, node: fx.Node, source: fx.Node) -> None:
        function, extras = region(node, source, self.random)
        pointwise = all(is_pointwise(n.target) for n in function.graph.nodes if n.op == "call_function")
        label = f"fused {'elementwise' if pointwise else 'function'} of {source.name}"
        if pointwise:
            module = elementwise(function, self.options.activation, _dtype(node))
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
            built: Built | None = build(_Site(self, node))
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
        for argument, value in zip(names, inputs, strict=False):
            if isinstance(value, Tensor):
                name = f"{node.name}_{argument}"
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
        if node.target is not __import__("operator").getitem:
            self._note(node, found.function.__name__, found.note)
        return True

    def _pointwise(self, node: fx.Node, random: list[fx.Node]) -> bool:
        if not is_pointwise(node.target):
            return False
        if len(random) > 1 or random[0] not in node.args or _shape_of(random[0]) != _shape_of(node):
            return self._delta(node)
        at = node.args.index(random[0])
        closed = CLOSED.get(node.target)
        if closed is not None and at == 0 and self.options.activation == "linearise":
            self.env[node] = self.graph.call_function(closed, self._map(node.args), self._map(node.kwargs))
            self._note(node, "elementwise", self._activation_note())
            return True
        rest = [a for a in node.all_input_nodes if a is not random[0]]
        if rest:
            function, extras = region(node, random[0], self.random)
            module = elementwise(function, self.options.activation, _dtype(node))
        else:
            function, extras = Pointwise(node.target, at, node.args, node.kwargs), []
            own = (node.target, (node.args[1:], node.kwargs)) if at == 0 else ()
            module = elementwise(function, self.options.activation, _dtype(node), *own)
        inputs = (self._value(random[0]), *(self._value(e) for e in extras))
        self.env[node] = self.graph.call_module(self._add_module(node.name, module), inputs)
        self._note(node, "elementwise", self._activation_note())
        return True

    def _delta(self, node: fx.Node) -> bool:
        if node.kwargs:
            return False
        name = self._add_module(node.name, _Delta(node.target))
        self.env[node] = self.graph.call_module(name, self._map(node.args))
        self._note(node, "delta", "linearised in each argument, arguments independent")
        return True

    # -- values in the new graph

    def _map(self, args: Any) -> Any:
        return fx.node.map_arg(args, self._value)

    def _value(self, node: fx.Node) -> fx.Node:
        """The node that stands for `node`; constants and random parameters enter the graph when first used."""
        if node not in self.env:
            if node in self.random:
                self.env[node] = self._random_parameter(node)
            else:
                self.env[node] = self.graph.get_attr(self._add_buffer(node))
        return self.env[node]

    def _mean(self, node: fx.Node) -> fx.Node:
        return self.graph.call_function(getattr, (self._value(node), "mean"))

    def _random_parameter(self, node: fx.Node) -> fx.Node:
        assert self.posterior is not None
        name = self.traced.parameters[node.name]
        mean = self.traced.constants[node.name]
        if self.options.full:
            leaf = RandomParameter(mean, None, self.posterior.covariance(name))
        else:
            leaf = RandomParameter(mean, self.posterior.variance(name).reshape(mean.shape), None)
        return self.graph.call_module(self._add_module(node.name, leaf))

    def constant(self, arg: Any) -> Tensor | None:
        """Value of a node that depends on constants only (None otherwise)."""
        if not isinstance(arg, fx.Node):
            return arg if isinstance(arg, Tensor) else None
        if arg not in self.static:
            return None
        if arg.op == "placeholder":
            return self.traced.constants[arg.name]
        return arg.target(*fx.node.map_arg(arg.args, self.constant), **fx.node.map_arg(arg.kwargs, self.constant))

    def weight(self, arg: Any) -> Weight | None:
        value = self.constant(arg)
        if value is not None:
            return Weight(value, None, False)
        transposed = False
        while isinstance(arg, fx.Node) and _is_transpose(arg):
            arg, transposed = arg.args[0], not transposed
        if not isinstance(arg, fx.Node) or arg.name not in self.traced.parameters or arg not in self.random:
            return None
        tensor = self.traced.constants[arg.name]
        return Weight(tensor.t() if transposed else tensor, self.traced.parameters[arg.name], transposed)

    def _add_buffer(self, node: fx.Node) -> str:
        value = self.constant(node)
        assert value is not None
        name = f"constant_{node.name}"
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
        if value in self.random or not _is_float(value):
            return new
        return self.graph.call_function(to_gaussian, (new,))

    # -- checks and words

    def _check_batch(self, node: fx.Node, random: list[fx.Node], weights: list[fx.Node]) -> None:
        value = node.meta.get("val")
        symbols = self.traced.batch_symbols
        if not symbols or not isinstance(value, Tensor) or len(weights) == len(node.all_input_nodes):
            return
        batched = [_depends(s, symbols) for s in value.shape]
        if any(batched[1:]):
            self.unsupported.append((node, "moves the batch dimension away from the front"))
        elif not any(batched) and any(_depends(s, symbols) for r in random for s in (_shape_of(r) or ())):
            self.unsupported.append((node, "mixes the samples of a batch"))

    def _note(self, node: fx.Node, rule: str, note: str) -> None:
        value = node.meta.get("val")
        shape: tuple[int | str, ...] = ()
        if isinstance(value, Tensor):
            shape = tuple("B" if _depends(s, self.traced.batch_symbols) else _hint(s) for s in value.shape)
        elif isinstance(value, (tuple, list)):
            shape = (f"{len(value)} parts",)
        structure = "none" if rule == "by mean" else self.options.covariance
        self.steps.append((node, Step(op_name(node.target), module_path(node), rule, structure, shape, note)))

    def _activation_note(self) -> str:
        return "linearised" if self.options.activation == "linearise" else "first two moments matched"

    def _plan(self) -> Plan:
        live = {n.name for n in self.graph.nodes}
        steps = tuple(step for node, step in self.steps if self.env[node].name in live)
        used = {self.traced.parameters[n.name] for n in self.random if n.name in self.traced.parameters}
        unused = sorted(self.names - used)
        if unused:
            warnings.warn(f"the model never uses these parameters of the posterior: {', '.join(unused)}", stacklevel=4)
        return Plan(steps, self.untouched, tuple(sorted(used)))

    def _unsupported_error(self) -> UnsupportedOpError:
        lines = [f"  {op_name(n.target)} at '{module_path(n)}' {why}" for n, why in dict(self.unsupported).items()]
        full = any("batch" in why for _, why in self.unsupported)
        remedy = (
            "Use covariance='diagonal' for models that move or mix the batch."
            if full
            else "Register a rule with @propagauss.rule(torch.ops....) (see the how-to on custom rules), or leave the "
            "parameters before these ops out of the posterior."
        )
        return UnsupportedOpError("cannot streamline this model:\n" + "\n".join(lines) + "\n" + remedy)


class _Delta(nn.Module):
    def __init__(self, op: Any):
        super().__init__()
        self.op = op

    def forward(self, *args: Any) -> Gaussian:
        return delta(self.op, *args)


def _nodes(arg: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(arg, lambda n: found.append(n) or n)
    return found


def _is_assertion(target: Any) -> bool:
    return "assert" in op_name(target) or "sym_constrain" in op_name(target)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


def _is_transpose(node: fx.Node) -> bool:
    if node.target == aten.t.default:
        return True
    if len(_shape_of(node) or ()) != 2:
        return False
    if node.target == aten.transpose.int:
        return {a % 2 for a in node.args[1:]} == {0, 1}
    return node.target == aten.permute.default and [a % 2 for a in node.args[1]] == [1, 0]


def _shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _depends(size: Any, symbols: set[Any]) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols & symbols)


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
