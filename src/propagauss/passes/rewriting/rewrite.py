"""The walk over a traced graph that builds the streamlined one: only what is downstream of uncertainty is rewritten."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from propagauss.gaussian import mean_of
from propagauss.network.plan import Step
from propagauss.network.streamlined import Streamlined
from propagauss.nodes import (
    depends,
    dtype_of,
    hint,
    is_assertion,
    is_complex,
    is_differentiable,
    is_float,
    module_path,
    op_name,
    shape_of,
)
from propagauss.passes.demand import wanted
from propagauss.passes.fusion import Chains, cut, is_elementwise, is_pointwise
from propagauss.passes.recognise import AT_MEAN, release
from propagauss.passes.rewriting.account import plan_of, unsupported
from propagauss.passes.rewriting.joint import Joint
from propagauss.passes.rewriting.new_graph import NewGraph
from propagauss.passes.rewriting.site import SiteOf
from propagauss.passes.rewriting.trial import try_out
from propagauss.passes.sample_mixing import is_batched, keeps_apart, mixes_samples, samples_of
from propagauss.posteriors.base import Posterior
from propagauss.rules.derivatives.jacobian import Linearised, LinearisedVariances, Piece
from propagauss.rules.derivatives.tangent import JOINS, LAYERS, is_affine
from propagauss.rules.elementwise.activation import CLOSED, MomentMatched, elementwise
from propagauss.rules.elementwise.comparisons import decisions, fusable_comparison
from propagauss.rules.registry import BUILDERS, FUNCTIONS, Built, Options, arguments, map_arguments
from propagauss.rules.wrapping import Delta, InputStructure, Pointwise, by_rows, to_gaussian
from propagauss.tracing.trace import Traced

aten = torch.ops.aten
# ops whose rules broadcast an unbatched random parameter against samples themselves
BROADCASTING = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar, aten.where.self),
    *(aten.prelu.default, aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default),
    *(aten.group_norm.default, aten.instance_norm.default, aten.layer_norm.default, aten.rms_norm.default),
}
# ops whose rules read a stored weight
STORED = {*LAYERS, aten.addmm.default, aten.mm.default, aten.matmul.default}


class Rewriter(NewGraph):
    """Walks the traced graph once and builds the new one.

    The nodes in `by_jacobian` are linearised by their own Jacobians, whatever rules they have.
    """

    def __init__(
        self,
        traced: Traced,
        posterior: Posterior | None,
        options: Options,
        by_jacobian: AbstractSet[fx.Node] = frozenset(),
    ):
        super().__init__(traced, posterior, options)
        self.by_jacobian = by_jacobian
        self.names = set() if posterior is None else set(posterior.names)
        self.from_means: set[fx.Node] = set()  # plain values that stand for uncertain ones
        self.built: set[fx.Node] = set()  # by rules that know the parameters of their layer
        self.moments: dict[fx.Node, tuple[MomentMatched, tuple[Any, ...]]] = {}
        self.owner: dict[fx.Node, fx.Node] = {}  # which op of the source a node of the new graph belongs to
        self.downstream = self._downstream()
        release(traced.graph, self.downstream)
        decided = decisions(traced.graph) if options.activation == "moments" else set()
        self.wanted = wanted(traced.graph, traced.outputs, decided)
        self.chains = Chains(any_op=options.full and options.activation == "linearise")
        self.joint = Joint(self)
        self.steps: list[tuple[fx.Node, Step]] = []
        self.unsupported: list[tuple[fx.Node, str]] = []

    # -- the walk

    def run(self) -> Streamlined:
        for node, uncertain in zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True):
            if node is not None:
                self._input(node, uncertain)
        for node in self.traced.graph.nodes:
            before = len(self.graph.nodes)
            if node.op == "placeholder" and node.name in self.traced.constants:
                self._constant_placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op not in ("placeholder", "output"):
                self.unsupported.append((node, "is not a plain call"))
            self._own(node, len(self.graph.nodes) - before)
        results = tuple(self._output(o) for o in self.traced.outputs)
        if self.unsupported:
            raise unsupported(self.unsupported)
        self.graph.output(results)
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        body = fx.GraphModule(self.root, self.graph, class_name="StreamlinedBody")
        body.delete_all_unused_submodules()
        return Streamlined(body, plan_of(self), self.traced).eval()

    def _own(self, node: fx.Node, count: int) -> None:
        """Remember for which op the last `count` nodes were made."""
        for _, new in zip(range(count), reversed(self.graph.nodes), strict=False):
            self.owner[new] = node

    def _input(self, node: fx.Node, uncertain: bool) -> None:
        new = self.graph.placeholder(node.name)
        if uncertain:
            new = self.emit("input", InputStructure(self.options.full), (new,))
            self.random.add(node)
            self.chains.start(node)
            self.joint.start(node)
        self.env[node] = new

    def _constant_placeholder(self, node: fx.Node) -> None:
        if self.traced.parameters.get(node.name) in self.names:
            self.random.add(node)
            self.unbatched.add(node)
            self.chains.start(node)
            self.joint.start(node)
        else:
            self.static.add(node)

    def _call(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if not any(a in self.random for a in inputs):
            if inputs and all(a in self.static for a in inputs):
                self.static.add(node)
            elif not is_assertion(node.target):
                self.env[node] = self.copied(node)
                if any(a in self.from_means for a in inputs):
                    self._remember_mean(node)
            return
        if is_assertion(node.target):
            return
        refusal = self._refusal(node)
        if refusal is not None:
            self.unsupported.append((node, refusal))
            self._by_mean(node)
            return
        random = [a for a in arguments(node) if a in self.random]
        if random and self._decides_function(node):
            self._rewrite(node, random)
        elif not random or not is_float(node) or node not in self.wanted:
            self._by_mean(node)
        else:
            self._rewrite(node, random)

    def _refusal(self, node: fx.Node) -> str | None:
        """Why an op on an uncertain value cannot be followed whatever its derivative, if so."""
        if node.target == aten.as_strided.default:
            return "reads memory as it is laid out in the model, which is not how it is here"
        known = node.target in FUNCTIONS or node.target in BUILDERS or node.target in CLOSED
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not known:
            return "draws random numbers, so that its result has no one mean"
        return None

    def _by_mean(self, node: fx.Node) -> None:
        """Sizes, comparisons, and what only attention weights depend on: computed from means, then deterministic."""
        if node.target is operator.getitem and node.args[0] in self.random and node.args[0] not in self.virtual:
            part = self.graph.node_copy(node, self.value)
            self.env[node] = self.graph.call_function(mean_of, (part,))
            self._remember_mean(node)
            return
        self.env[node] = self.copied(node)
        self._remember_mean(node)
        if isinstance(node.meta.get("val"), Tensor) and not is_float(node):
            self._note(node, "by mean", "decided by the mean, deterministic from here on")

    def _remember_mean(self, node: fx.Node) -> None:
        """A plain value that stands for an uncertain one; where it becomes attention weights, the plan says so."""
        self.from_means.add(node)
        if node.meta.get(AT_MEAN):
            self._note(node, "by mean", "attention weights at the mean of queries and keys")

    def _rewrite(self, node: fx.Node, random: list[fx.Node]) -> None:
        self.random.add(node)
        if all(r in self.unbatched for r in random) and not is_batched(node, self.traced):
            self.unbatched.add(node)
        source = self._link(node, random)
        self.joint.link(node, random)
        if self._is_virtual(node, random):
            self.virtual.add(node)
            return
        if self.options.full:
            self._check_full(node, random)
        if source is not None and self.options.activation == "moments" and is_pointwise(node.target):
            source = self._beginning(node, source)
        several = (
            (source is not None and source not in random)
            or self._occurrences(node) > 1
            or any(r in self.virtual for r in random)
        )
        if source is not None and source not in self.virtual and several and node not in self.by_jacobian:
            self._fused(node, source)
            return
        if not self._by_rule(node, random) and not self._by_own_jacobian(node):
            self.unsupported.append((node, "has no rule"))
            self.env[node] = self.graph.placeholder(node.name)  # never run: an error is on its way
            return
        if self.options.full:
            self._correlate(node)

    def _link(self, node: fx.Node, random: list[fx.Node]) -> fx.Node | None:
        weights = [a for a in random if a.op == "placeholder" and a.name in self.traced.constants]
        if weights and self.options.full and not (len(random) == 1 and is_pointwise(node.target)):
            self.chains.start(node)  # a layer: its weight need not be held in a dense covariance
            return None
        return self.chains.link(node, random)

    def _beginning(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Where an elementwise function that ends here begins, for its moments: at the last value that is Gaussian.

        What is not an affine function of a Gaussian is none, and moments of moments add up errors.
        """
        found = [n for n in self.chains.links(node)[1:] if n not in self.virtual and shape_of(n) == shape_of(node)]
        if source not in found:
            return source
        root = found[-1]
        for candidate in found[found.index(source) :]:
            if candidate is root or is_affine(cut(candidate, [root], self.random)[0], 0):
                return candidate
        return root

    def _occurrences(self, node: fx.Node) -> int:
        """How often uncertain values stand among the arguments of an op, one that stands there twice counted twice."""
        found: list[fx.Node] = []
        map_arguments(node, lambda a: found.append(a) or a, lambda a: a)
        return sum(a in self.random for a in found)

    def _is_virtual(self, node: fx.Node, random: list[fx.Node]) -> bool:
        """Whether the result cannot be a Gaussian: the ops that read it are then linearised together with this one."""
        if isinstance(node.meta.get("val"), (tuple, list)):
            known = node.target in FUNCTIONS or node.target in BUILDERS
            return not known or not self._rule_fits(node, random)
        return is_complex(node) or not is_float(node)

    def _decides_function(self, node: fx.Node) -> bool:
        """Whether a comparison is part of a function whose moments are matched, as in `where(h > 0, h, 0)`."""
        if self.options.activation != "moments" or node not in self.wanted:
            return False
        return fusable_comparison(node, lambda a: a not in self.downstream)

    def _downstream(self) -> set[fx.Node]:
        """All that uncertainty may reach."""
        found = {n for n, uncertain in zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True) if uncertain}
        for node in self.traced.graph.nodes:
            parameter = self.traced.parameters.get(node.name) if node.op == "placeholder" else None
            if parameter in self.names or any(a in found for a in node.all_input_nodes):
                found.add(node)
        return {n for n in found if n is not None}

    # -- the ways to rewrite one op

    def _by_rule(self, node: fx.Node, random: list[fx.Node]) -> bool:
        if not self._rule_fits(node, random):
            return False
        if self.options.full and any(r in self.unbatched for r in random):
            if node.target in STORED:
                return self._build(node)
            if node not in self.unbatched and node.target not in BROADCASTING:
                return self._pointwise(node, random)
        return self._build(node) or self._apply_function(node) or self._pointwise(node, random)

    def _rule_fits(self, node: fx.Node, random: list[fx.Node]) -> bool:
        """Whether the rules for the op, if there are any, are made for such arguments."""
        if node in self.by_jacobian or any(r in self.virtual for r in random):
            return False
        if self._occurrences(node) > len(random) and not is_pointwise(node.target) and node.target not in JOINS:
            return False  # a product of a value with itself, which rules for products take for one of strangers
        if not self.options.full or not any(r in self.unbatched for r in random):
            return True
        if node in self.unbatched:  # not to be broadcast: the first dimension of a parameter is no batch
            same = shape_of(random[0]) == shape_of(node)
            return len(random) == 1 and node.target not in STORED and (same or not is_pointwise(node.target))
        if node.target in STORED:
            return self._is_layer(node, random)
        return node.target in BROADCASTING or is_pointwise(node.target)

    def _is_layer(self, node: fx.Node, random: list[fx.Node]) -> bool:
        """Whether the values without a batch are stored weights, and the input has a batch."""
        loose = [r for r in random if r in self.unbatched]
        if node in self.unbatched or any(self.weight(r) is None for r in loose):
            return False
        inputs: Any = node.args[1 if node.target == aten.addmm.default else 0]
        if node.target in (aten.matmul.default, aten.mm.default) and len(shape_of(node.args[1]) or ()) != 2:
            return False
        return inputs not in loose and len(shape_of(inputs) or ()) > 1

    def _fused(self, node: fx.Node, source: fx.Node) -> None:
        function, extras = cut(node, [source], self.random)
        pointwise = all(is_elementwise(n.target) for n in function.graph.nodes if n.op == "call_function")
        label = f"fused {'elementwise' if pointwise else 'function'} of {source.name}"
        if pointwise and shape_of(source) == shape_of(node):
            module = elementwise(function, self.options.activation, dtype_of(node), graph=function)
            inputs = (self.value(source), *map(self.plain, extras))
            self.env[node] = self.emit(node.name, module, inputs)
            self._remember_moments(node, module, inputs)
            note = self._activation_note()
        else:
            note = self._linearise(node, self.piece_from(node, [source], function), [source], extras)
            note = "exact" if note == "exact" else "linearised as a whole"
        self._note(node, label, note)

    def _by_own_jacobian(self, node: fx.Node) -> bool:
        """Anything with a derivative, as a function of the nearest uncertain values."""
        if not is_differentiable(node.target):
            return False
        sources = self.sources(node)
        piece, extras = self.piece(node)
        self._note(node, "Jacobian", self._linearise(node, piece, sources, extras))
        return True

    def _linearise(self, node: fx.Node, piece: Piece, sources: list[fx.Node], extras: list[fx.Node]) -> str:
        """Emit a piece as a function of independent values; returns what that assumes."""
        if self.options.full:
            module: nn.Module = Linearised(piece)
        else:
            apart = [s not in self.unbatched and keeps_apart(piece, s, sources, extras, self.traced) for s in sources]
            module = LinearisedVariances(piece, apart)
        inputs = (*map(self.value, sources), *map(self.plain, extras))
        self.env[node] = self.emit(node.name, module, inputs)
        if len(sources) == 1 and piece.affine[0] and self.options.full:
            return "exact"
        columns = sum(self.entries(s) for s in sources)
        kept = "linearised by its own Jacobian" if self.options.full else "linearised by its own Jacobian, squared"
        return f"{kept}: as much work as {columns} times the op"

    def _correlate(self, node: fx.Node) -> None:
        """Add what the covariances between the arguments of an op bring."""
        new = self.joint.with_covariances(node, self.env[node])
        if new is not self.env[node]:
            step = self.env[node].meta.get("step")
            self.env[node] = new
            if step is not None:
                self.steps.pop()
                self._note_step(node, step.extended("covariance between its arguments kept"))

    def _build(self, node: fx.Node) -> bool:
        for build in reversed(BUILDERS.get(node.target, [])):
            site: Any = SiteOf(self, node)
            built: Built | None = build(site)
            if built is not None:
                self.built.add(node)
                self.env[node] = self._emit_built(node, built.target, built.inputs)
                label = type(built.target).__name__ if isinstance(built.target, nn.Module) else built.target.__name__
                self._note(node, label, built.note)
                return True
        return False

    def _emit_built(self, node: fx.Node, target: Any, inputs: tuple[Any, ...]) -> fx.Node:
        """Call a module or a function at run time; tensors among the inputs become buffers."""
        values = []
        names = list(inspect.signature(target.forward if isinstance(target, nn.Module) else target).parameters)
        for i, value in enumerate(inputs):
            if isinstance(value, Tensor):
                name = f"{node.name}_{names[min(i, len(names) - 1)]}"
                self.root.register_buffer(name, value)
                values.append(self.graph.get_attr(name))
            else:
                values.append(map_arg(value, self.value))
        if isinstance(target, nn.Module):
            return self.emit(node.name, target, tuple(values))
        return self.graph.call_function(target, tuple(values))

    def _apply_function(self, node: fx.Node) -> bool:
        found = FUNCTIONS.get(node.target)
        if found is None:
            return False
        self.env[node] = self.graph.call_function(found.function, *map_arguments(node, self.value, self.plain))
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
            self.env[node] = self.graph.call_function(
                closed, map_arg(node.args, self.value), map_arg(node.kwargs, self.value)
            )
            self._note(node, "elementwise", self._activation_note())
            return True
        graph, extras = cut(node, [random[0]], self.random)
        if extras:
            module = elementwise(graph, self.options.activation, dtype_of(node), graph=graph)
        else:
            function = Pointwise(node.target, at, node.args, node.kwargs)
            op = node.target if at == 0 else None
            settings = (node.args[1:], node.kwargs)
            module = elementwise(function, self.options.activation, dtype_of(node), op, settings, graph)
        inputs = (self.value(random[0]), *(self.plain(e) for e in extras))
        self.env[node] = self.emit(node.name, module, inputs)
        self._remember_moments(node, module, inputs)
        self._note(node, "elementwise", self._activation_note())
        return True

    def _remember_moments(self, node: fx.Node, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, MomentMatched):
            self.moments[node] = (module, inputs)

    def _delta(self, node: fx.Node) -> bool:
        if node.kwargs:
            return False
        self.env[node] = self.emit(node.name, Delta(node.target), map_arg(node.args, self.value))
        self._note(node, "delta", "linearised in each argument, arguments independent")
        return True

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if value in self.virtual:
            self.unsupported.append((value, "returns complex numbers: return torch.view_as_real of them"))
            return None
        new = self.value(value)
        samples = samples_of(value, self.traced) if value in self.random and self.options.full else None
        if samples is not None and samples[0] == 1 and samples[1] > 1:
            return self.graph.call_function(by_rows, (new, samples[1]))
        if value in self.random or not is_float(value) or is_complex(value):
            return new
        return self.graph.call_function(to_gaussian, (new,))

    # -- checks and words

    def _check_full(self, node: fx.Node, random: list[fx.Node]) -> None:
        """Collect what the full structure cannot represent."""
        batched = [r for r in random if r not in self.unbatched and r not in self.virtual]
        lifted = not batched and node not in self.unbatched and isinstance(node.meta["val"], Tensor)
        if (batched and mixes_samples(node, batched, self.traced)) or (
            lifted and samples_of(node, self.traced) is None
        ):
            self.unsupported.append((node, "mixes the samples of a batch, or moves the batch away from the front"))

    def _note(self, node: fx.Node, rule: str, note: str) -> None:
        value = node.meta.get("val")
        shape: tuple[int | str, ...] = ()
        if isinstance(value, Tensor):
            shape = tuple("B" if depends(s, self.traced.batch_symbols) else hint(s) for s in value.shape)
        elif isinstance(value, (tuple, list)):
            shape = (f"{len(value)} parts",)
        structure = "none" if rule == "by mean" else self.options.covariance
        self._note_step(node, Step(op_name(node.target), module_path(node), rule, structure, shape, note))

    def _note_step(self, node: fx.Node, step: Step) -> None:
        self.steps.append((node, step))
        self.env[node].meta["step"] = step

    def _activation_note(self) -> str:
        return "linearised" if self.options.activation == "linearise" else "first two moments matched"


def rewrite(traced: Traced, posterior: Posterior | None, options: Options) -> Streamlined:
    """The streamlined network. An op whose rule turns out not to fit it is linearised by its own Jacobian instead."""
    by_jacobian: set[fx.Node] = set()
    while True:
        rewriter = Rewriter(traced, posterior, options, by_jacobian)
        net = rewriter.run()
        failure = try_out(net, traced)
        if failure is None:
            return net
        culprit = rewriter.owner.get(failure.node)
        if culprit is None or culprit in by_jacobian:
            why = f"has no rule, and cannot be differentiated: {type(failure.error).__name__}: {failure.error}"
            raise unsupported([(culprit or failure.node, why)]) from failure.error
        by_jacobian.add(culprit)
