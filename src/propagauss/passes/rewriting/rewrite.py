"""The walk over a traced graph that builds the streamlined one: only what is downstream of uncertainty is rewritten.

Every op falls to one of these: made of constants (nothing is emitted until somebody reads it); deterministic (copied);
uncertain but read only for its mean (copied, on means); *virtual*, no Gaussian by itself (left to its readers);
else one of the strategies emits what stands for it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.gaussian import mean_of
from propagauss.network.plan import Step
from propagauss.network.streamlined import Streamlined
from propagauss.nodes import A_NUMBER, AT_MEAN, STEP, is_assertion, is_complex, is_float, makes_number, shape_of
from propagauss.passes.demand import wanted
from propagauss.passes.fusion import Chains, cut, is_pointwise
from propagauss.passes.recognise import release
from propagauss.passes.refusals import DRAWS, draws, refusal
from propagauss.passes.rewriting.account import (
    MEAN_ALONE,
    MIXED,
    MIXES,
    MOVES,
    plan_of,
    step_of,
    unsupported,
    warn_of_mixing,
)
from propagauss.passes.rewriting.joint import Joint
from propagauss.passes.rewriting.new_graph import NewGraph
from propagauss.passes.rewriting.site import OpSite
from propagauss.passes.rewriting.strategies import FOR_FAILED, STRATEGIES, fits
from propagauss.passes.rewriting.trial import try_out
from propagauss.passes.sample_mixing import is_batched, mixes_samples, samples_of
from propagauss.passes.samples_apart import samples_may_meet
from propagauss.posteriors.base import Posterior
from propagauss.rules.derivatives.tangent import is_affine
from propagauss.rules.elementwise.comparisons import decisions, fusable_comparison
from propagauss.rules.registry import BUILDERS, FUNCTIONS, Options, arguments
from propagauss.rules.wrapping import InputStructure, by_rows, to_gaussian
from propagauss.tracing.trace import Traced

aten = torch.ops.aten


def rewrite(traced: Traced, posterior: Posterior | None, options: Options) -> Streamlined:
    """The streamlined network. An op whose rule turns out not to fit it is linearised by its own Jacobian instead."""
    failed: dict[fx.Node, Exception] = {}
    meet = functools.cache(lambda: samples_may_meet(traced, () if posterior is None else posterior.names))
    while True:
        rewriter = Rewriter(traced, posterior, options, failed, meet)
        net = rewriter.run()
        failure = try_out(net, traced)
        if failure is None:
            warn_of_mixing(rewriter.mixing)
            return net
        culprit = rewriter.owner.get(failure.node)
        if culprit is None or culprit in failed:
            why = f"has no rule, and cannot be differentiated: {type(failure.error).__name__}: {failure.error}"
            raise unsupported([(culprit or failure.node, why)]) from failure.error
        failed[culprit] = failure.error


class Rewriter:
    """One walk over the traced graph; the ops in `failed` have rules that did not run on the example.

    If samples of a batch `meet`, `mixing` names the ops where those that are uncertain do.
    """

    def __init__(
        self,
        traced: Traced,
        posterior: Posterior | None,
        options: Options,
        failed: Mapping[fx.Node, Exception],
        meet: Callable[[], bool],
    ):
        self.meet, self.mixing, self.mixed = meet, list[fx.Node](), set[fx.Node]()
        self.traced, self.options, self.failed = traced, options, failed
        self.names = set() if posterior is None else set(posterior.names)
        self.downstream = self._downstream()
        release(traced.graph, self.downstream)
        decided = decisions(traced.graph) if options.activation == "moments" else set()
        self.new = NewGraph(traced, posterior, options, wanted(traced.graph, traced.outputs, decided))
        self.chains = Chains(any_op=options.full and options.activation == "linearise")
        self.joint = Joint(self.new)
        self.from_means: set[fx.Node] = set()  # plain values that stand for uncertain ones
        self.owner: dict[fx.Node, fx.Node] = {}  # which op of the source a node of the new graph belongs to
        self.notes: list[tuple[fx.Node, Step]] = []
        self.unsupported: list[tuple[fx.Node, str]] = []

    def _downstream(self) -> set[fx.Node]:
        """All that uncertainty may reach."""
        found = {n for n, uncertain in zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True) if uncertain}
        for node in self.traced.graph.nodes:
            parameter = self.traced.parameters.get(node.name) if node.op == "placeholder" else None
            if parameter in self.names or any(a in found for a in node.all_input_nodes):
                found.add(node)
        return {n for n in found if n is not None}

    # -- the walk

    def run(self) -> Streamlined:
        new = self.new
        for node, uncertain in zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True):
            if node is not None:
                self._input(node, uncertain)
        for node in self.traced.graph.nodes:
            before = len(new.graph.nodes)
            if node.op == "placeholder" and node.name in self.traced.constants:
                self._constant_placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op not in ("placeholder", "output"):
                self.unsupported.append((node, "is not a plain call"))
            self._own(node, len(new.graph.nodes) - before)
        results = tuple(self._output(o) for o in self.traced.outputs)
        self.unsupported += ((node, DRAWS) for node in draws(self.traced))
        if self.unsupported:
            raise unsupported(self.unsupported)
        new.graph.output(results)
        new.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        body = fx.GraphModule(new.root, new.graph, class_name="StreamlinedBody")
        body.delete_all_unused_submodules()
        return Streamlined(body, plan_of(new, self.notes, self.joint.left_out), self.traced).eval()

    def _own(self, node: fx.Node, count: int) -> None:
        """Remember for which op the last `count` nodes were made."""
        for _, made in zip(range(count), reversed(self.new.graph.nodes), strict=False):
            self.owner[made] = node

    def _input(self, node: fx.Node, uncertain: bool) -> None:
        value = self.new.graph.placeholder(node.name)
        if uncertain:
            value = self.new.emit("input", InputStructure(self.options.full), (value,))
            self._start(node)
        self.new.env[node] = value

    def _constant_placeholder(self, node: fx.Node) -> None:
        if self.traced.parameters.get(node.name) in self.names:
            self.new.unbatched.add(node)
            self._start(node)
        else:
            self.new.static.add(node)

    def _start(self, node: fx.Node) -> None:
        """A source of randomness."""
        self.new.random.add(node)
        self.chains.start(node)
        self.joint.start(node)

    def _call(self, node: fx.Node) -> None:
        new, inputs = self.new, node.all_input_nodes
        if makes_number(node) and any(a in new.random or a in self.from_means for a in inputs):
            self.unsupported.append((node, A_NUMBER))
        if not any(a in new.random for a in inputs):
            if inputs and all(a in new.static for a in inputs):
                new.static.add(node)
            elif not is_assertion(node.target):
                new.env[node] = new.copied(node)
                if any(a in self.from_means for a in inputs):
                    self._remember_mean(node)
            return
        if is_assertion(node.target):
            return
        why = refusal(node)
        random = [a for a in arguments(node) if a in new.random]
        if why is not None:
            self.unsupported.append((node, why))
            self._at_mean(node)
        elif random and (self._decides_function(node) or (is_float(node) and node in new.wanted)):
            self._rewrite(node, random)
        else:
            self._at_mean(node)

    def _decides_function(self, node: fx.Node) -> bool:
        """Whether a comparison is part of a function whose moments are matched, as in `where(h > 0, h, 0)`."""
        if self.options.activation != "moments" or node not in self.new.wanted:
            return False
        return fusable_comparison(node, lambda a: a not in self.downstream)

    def _at_mean(self, node: fx.Node) -> None:
        """Sizes, comparisons, and what only attention weights depend on: computed from means, then deterministic."""
        new = self.new
        if node.target is operator.getitem and node.args[0] in new.random and node.args[0] not in new.virtual:
            part = new.graph.node_copy(node, new.value)
            new.env[node] = new.graph.call_function(mean_of, (part,))
            self._remember_mean(node)
            return
        new.env[node] = new.copied(node)
        self._remember_mean(node)
        if isinstance(node.meta.get("val"), Tensor) and not is_float(node):
            self._note(node, step_of(new, node, MEAN_ALONE, "decided by the mean, deterministic from here on"))

    def _remember_mean(self, node: fx.Node) -> None:
        """A plain value that stands for an uncertain one; where it becomes attention weights, the plan says so."""
        self.from_means.add(node)
        if node.meta.get(AT_MEAN):
            note = "attention weights with queries and keys fixed at their means"
            self._note(node, step_of(self.new, node, MEAN_ALONE, note))

    # -- one op on uncertain values

    def _rewrite(self, node: fx.Node, random: list[fx.Node]) -> None:
        new = self.new
        new.random.add(node)
        if all(r in new.unbatched for r in random) and not is_batched(node, self.traced):
            new.unbatched.add(node)
        source = self._link(node, random)
        self.joint.link(node, random)
        site = OpSite(new, node, random, source)
        if self._is_virtual(site):
            new.virtual.add(node)
            return
        if self.options.full:
            self._check_full(node, random)
        if source is not None and self.options.activation == "moments" and is_pointwise(node.target):
            site = OpSite(new, node, random, self._beginning(node, source))
        strategies = FOR_FAILED if node in self.failed else STRATEGIES
        emitted = next(filter(None, (strategy(site) for strategy in strategies)), None)
        if emitted is None:
            error = self.failed.get(node)
            why = "has no rule" if error is None else f"has a rule that fails: {type(error).__name__}: {error}"
            self.unsupported.append((node, why))
            new.env[node] = new.graph.placeholder(node.name)  # never run: an error is on its way
            return
        value = emitted.value
        if emitted.by_layer:
            new.built.add(node)
        if emitted.moments is not None:
            new.moments[node] = emitted.moments
        new.env[node] = value
        if self.options.full and not emitted.is_whole:
            new.env[node] = self.joint.with_covariances(node, value)
        note = emitted.note
        if not self.options.full and self.meet() and self._mixes(node):
            if not self.mixed.issuperset(random):  # what only hands on what is mixed is not to blame
                self.mixing.append(_whole(node))
            self.mixed.add(node)
            note = MIXED
        step = None if emitted.rule is None else step_of(new, node, emitted.rule, note)
        if step is not None:
            kept = new.env[node] is not value
            self._note(node, step.extended("covariance between its arguments kept") if kept else step)

    def _link(self, node: fx.Node, random: list[fx.Node]) -> fx.Node | None:
        weights = [a for a in random if a.op == "placeholder" and a.name in self.traced.constants]
        if weights and self.options.full and not (len(random) == 1 and is_pointwise(node.target)):
            self.chains.start(node)  # a layer: its weight need not be held in a dense covariance
            return None
        return self.chains.link(node, random)

    def _is_virtual(self, site: OpSite) -> bool:
        """Whether the result cannot be a Gaussian: the ops that read it are then linearised together with this one."""
        if isinstance(site.node.meta.get("val"), (tuple, list)):
            known = site.op in FUNCTIONS or site.op in BUILDERS
            return not known or site.node in self.failed or not fits(site)
        return is_complex(site.node) or not is_float(site.node)

    def _beginning(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Where an elementwise function that ends here begins, for its moments: at the last value that is Gaussian.

        What is not an affine function of a Gaussian is none, and moments of moments add up errors.
        """
        chain = self.chains.links(node)[1:]
        found = [n for n in chain if n not in self.new.virtual and shape_of(n) == shape_of(node)]
        if source not in found:
            return source
        root = found[-1]
        for candidate in found[found.index(source) :]:
            if candidate is root or is_affine(cut(candidate, [root], self.new.random)[0], 0):
                return candidate
        return root

    def _check_full(self, node: fx.Node, random: list[fx.Node]) -> None:
        """Collect what the full structure cannot represent."""
        new = self.new
        batched = any(r not in new.unbatched and r not in new.virtual for r in random)
        lifted = not batched and node not in new.unbatched and isinstance(node.meta["val"], Tensor)
        if self._mixes(node) or (lifted and samples_of(node, self.traced) is None):
            self.unsupported.append((_whole(node), MIXES if self.meet() else MOVES))

    def _mixes(self, node: fx.Node) -> bool:
        new = self.new
        return mixes_samples(node, lambda a: a in new.random and a not in new.unbatched, self.traced, new.virtual)

    def _note(self, node: fx.Node, step: Step) -> None:
        self.notes.append((node, step))
        self.new.env[node].meta[STEP] = step

    def _output(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        new = self.new
        if value in new.virtual:
            self.unsupported.append((value, "returns complex numbers: return torch.view_as_real of them"))
            return None
        result = new.value(value)
        samples = samples_of(value, self.traced) if value in new.random and self.options.full else None
        if samples is not None and samples[0] == 1 and samples[1] > 1:
            return new.graph.call_function(by_rows, (result, samples[1]))
        if value in new.random or not is_float(value) or is_complex(value):
            return result
        return new.graph.call_function(to_gaussian, (result,))


def _whole(node: fx.Node) -> fx.Node:
    """The op that gave the parts of which a node takes one."""
    return node.args[0] if node.target is operator.getitem and isinstance(node.args[0], fx.Node) else node
