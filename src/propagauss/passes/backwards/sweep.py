"""From a traced graph to one that also sends the sensitivities of its outputs backwards.

With `f` the model and `w` its random parameters, `Cov[f] = J Σ Jᵀ` to first order, `J = ∂f/∂w`. The graph that is built
here runs the model once, keeps what its derivatives need, starts with the identity at the output (`g [K, B, ...]`, one
row for every output of a sample) and pulls it back op by op. What arrives at a parameter are the rows of its Jacobian,
sample by sample; layers with one vector per sample add their part without them. The sum of all is the covariance.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from propagauss.network.linearised import Linearised, Sensitivities
from propagauss.network.plan import Plan
from propagauss.nodes import hint, is_float
from propagauss.passes.backwards.arguments import has_derivative, is_several, paths, read, value_type
from propagauss.passes.backwards.choice import Choice, ChosenRows, Seeds
from propagauss.passes.backwards.layers import at_positions, behind, layer, on_patches
from propagauss.passes.backwards.new_graph import NewGraph
from propagauss.passes.backwards.pulling import Pulling
from propagauss.passes.backwards.results import of_input, seed, seed_unless_whole, weight_rows
from propagauss.passes.backwards.samples.axes import PLAIN, axes
from propagauss.passes.backwards.samples.layout import observed
from propagauss.passes.backwards.shortcuts.averages import factor_averages
from propagauss.passes.backwards.shortcuts.gates import move_gates
from propagauss.passes.backwards.shortcuts.images import read_images, tile_adjoints
from propagauss.passes.backwards.suitable import (
    check_batch,
    check_derivatives,
    check_keywords,
    check_numbers,
    check_ops,
    check_outputs,
    check_size,
)
from propagauss.passes.backwards.terms import Terms
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.rules.adjoints.forms import DiagonalEmbedding, independent, layer_form
from propagauss.rules.adjoints.positions import Sizes, shared_form
from propagauss.rules.adjoints.shifts import Geometry
from propagauss.tracing.trace import Traced

aten = torch.ops.aten


class Sweep:
    """Builds the graph of one forward and, for every uncertain output, one backward walk."""

    def __init__(self, traced: Traced, posterior: Posterior | None, full: bool, choice: Choice | None = None):
        self.traced, self.posterior, self.full, self.choice = traced, posterior, full, choice
        self.chosen: Seeds | None = None  # where the walk from some outputs starts
        self.new = NewGraph(traced)
        names = set() if posterior is None else set(posterior.names)
        self.leaves = {
            n: traced.parameters[n.name]
            for n in traced.graph.nodes
            if n.op == "placeholder" and traced.parameters.get(n.name) in names
        }
        self.active = self._active()
        self.axes = observed(traced, axes(traced), self.active)
        self.sensitivity: dict[fx.Node, Any] = {}
        self.terms = Terms(self.new, posterior, full, self.leaves)
        self.entries = 1  # of the output, for each sample
        self.values = 0  # entries of the largest sensitivities so far, for one sample and one entry of the output
        self.pulling = Pulling(self.new, self.axes)
        self.geometries: dict[fx.Node, Geometry] = {}  # of the patches that convolutions meet
        self.walks: dict[int, Sensitivities] = {}

    def run(self) -> Linearised:
        check_ops(self.traced, self.active)
        check_numbers(self.traced, self.active)
        check_batch(self.traced, self.active, self.axes)
        check_keywords(self.traced, self.active)
        check_outputs(self.traced, self.active, self.axes)
        check_derivatives(self.traced, self.active)
        self.new.copy_model(self.active)
        self.new.graph.output(tuple(self._result(i, output) for i, output in enumerate(self.traced.outputs)))
        move_gates(self.new.graph, self.new.root)
        factor_averages(self.new.graph, self.new.root)
        read_images(self.new.graph, self.new.root, self.geometries)
        tile_adjoints(self.new.graph, self.new.root, self.entries)
        self.new.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        body = fx.GraphModule(self.new.root, self.new.graph, class_name="LinearisedBody")
        body.delete_all_unused_submodules()
        for i in self.walks:  # what parts of an output are taken from, also where the graph need not read it
            setattr(body, f"whole_{i}", getattr(self.new.root, f"whole_{i}"))
        untouched = sum(n.op == "call_function" and n not in self.active for n in self.traced.graph.nodes)
        notes = () if self.choice is None else (self.choice.note,)
        plan = Plan(tuple(self.new.steps.values()), untouched, tuple(sorted(set(self.leaves.values()))), notes)
        return Linearised(body, plan, self.traced, self.walks, "full" if self.full else "diagonal").eval()

    def _active(self) -> set[fx.Node]:
        """All values that are uncertain."""
        inputs = zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True)
        found = {*self.leaves, *(n for n, uncertain in inputs if uncertain and n is not None)}
        for node in self.traced.graph.nodes:
            if any(a in found for a in read(node)) and has_derivative(node):
                found.add(node)
        return found

    def _result(self, i: int, output: Any) -> Any:
        if not isinstance(output, fx.Node) or not is_float(output):
            return self.new.env[output] if isinstance(output, fx.Node) else output
        event = [hint(s) for s in output.meta["val"].shape[1:]]
        if self.choice is not None:
            self.chosen = Seeds(self.new.graph, self.new.root, self.choice, self.new.env[output], event, i)
        index = () if self.chosen is None else (self.chosen.index,)
        if output not in self.active:
            return self.new.env[output], None, *index
        self.entries = math.prod(event) if self.chosen is None else self.chosen.rows
        widest = max(self._size(n) for n in self.active if n in self.axes)
        check_size(output, self.entries, widest, self.choice is not None)
        start = self._seed(i, output)
        self.values, self.sensitivity = 0, {output: start}
        self.terms = Terms(self.new, self.posterior, self.full, self.leaves)
        for node in reversed(list(self.traced.graph.nodes)):
            g = self.sensitivity.pop(node, None)
            if g is not None:
                self._arrive(node, g, g is start)
                if g is start and self.chosen is not None and not start.users:
                    # rows of a weight took the place of the seeds
                    self.values = max(3 * self._size(a) for _, a in paths(node) if a in self.active) + self.terms.kept
        total = self.terms.total()
        self.walks[i] = Sensitivities(self.entries, self.values, output.meta["val"].dtype)
        other = next((n for n in (*self.leaves, *self.new.given) if value_type(n) != value_type(output)), output)
        return self.new.env[output], self.new.in_type_of(output, other, total), *index

    def _seed(self, i: int, output: fx.Node) -> fx.Node:
        if self.chosen is not None:
            return self.chosen.begin(self.new.seeds[i])
        event = [hint(s) for s in output.meta["val"].shape[1:]]
        eye = torch.eye(math.prod(event), dtype=output.meta["val"].dtype)
        self.new.root.register_buffer(f"whole_{i}", eye)
        whole = self.new.graph.get_attr(f"whole_{i}")
        return self.new.graph.call_function(seed, (self.new.seeds[i], whole, self.new.env[output], event))

    def _start(self, output: fx.Node) -> fx.Node:
        """The same for a layer at the output, which takes None for the identity."""
        event = [hint(s) for s in output.meta["val"].shape[1:]]
        return self.new.call(
            seed_unless_whole, self.new.seeds[self.traced.outputs.index(output)], self.new.env[output], event
        )

    def _arrive(self, node: fx.Node, g: Any, is_identity: bool) -> None:
        if node in self.leaves:
            self.terms.collect(node, g)
        elif node in self.new.given:
            self.terms.add(self.new.graph.call_function(of_input, (g, self.new.given[node], self.full)))
        elif node.target is operator.getitem and is_several(node.args[0]):
            self._put_part(node.args[0], node.args[1], g)  # type: ignore[arg-type]
        else:
            self.values = max(self.values, 3 * self._size(node))
            done = self._as_layer(node, g, is_identity)
            for path, argument in paths(node):
                if argument in self.active and argument not in done:
                    self.values = max(self.values, 3 * self._size(argument) + self.terms.kept)
                    pulled = self.new.in_type_of(argument, node, self._pulled(node, g, path, argument, is_identity))
                    if argument in self.leaves and self.terms.used_once(argument):
                        self.terms.finish(self.leaves[argument], pulled)  # at once: one layer's Jacobian at a time
                    else:
                        self._add(argument, pulled)

    def _put_part(self, node: fx.Node, index: int, g: Any) -> None:
        """A part of a result in several parts, whose sensitivities are a list."""
        parts = self.sensitivity.setdefault(node, [None] * len(node.meta["val"]))
        index %= len(parts)
        parts[index] = g if parts[index] is None else self.new.sum(parts[index], g)

    def _add(self, node: fx.Node, g: fx.Node) -> None:
        old = self.sensitivity.get(node)
        self.sensitivity[node] = g if old is None else self.new.sum(old, g)

    def _pulled(self, node: fx.Node, g: Any, path: tuple[int, ...], argument: fx.Node, is_identity: bool) -> fx.Node:
        if is_identity and self.chosen is not None and node.target == aten.linear.default and path == (0,):
            self.new.note(node, "adjoint")
            return self.chosen.through(self.new.env[node.args[1]])  # type: ignore[index]
        if is_identity and node.target == aten.linear.default and path == (0,) and node.meta["val"].dim() == 2:
            self.new.note(node, "adjoint")
            seeds = self.new.seeds[self.traced.outputs.index(node)]
            return self.new.call(weight_rows, seeds, self.new.env[node.args[1]], self.new.env[node])  # type: ignore[index]
        return self.pulling.pulled(node, g, path, argument)

    def _as_layer(self, node: fx.Node, g: Any, is_identity: bool) -> set[fx.Node]:
        """A layer that adds its part at once; returns the parameters that are done with it."""
        if node.target == aten.embedding.default:
            return self._as_embedding(node, g)
        found = layer(node, lambda n: n in self.leaves and self.terms.used_once(n))
        if found is None or self.posterior is None or self.axes.get(found.x) != self.axes.get(node, ()):
            return set()
        axis, env = self.axes[node], self.new.env
        random_bias = None if found.bias is None else self.leaves[found.bias]
        own = independent(self.posterior, self.leaves[found.stored], random_bias, found.transposed)
        if own is None:
            return set()
        if is_identity and self.chosen is not None and node.target == aten.linear.default and own.basis is None:
            form: Any = ChosenRows(own, self.full)
            inputs: tuple[Any, ...] = *self.chosen.rows_taken, env[found.x]
        elif found.has_one_vector(axis):
            form = layer_form(own, self.full)
            inputs = self._start(node) if is_identity and self.chosen is None else g, env[found.x]
        else:
            sizes = Sizes(self.entries, found.positions(self.traced.batch), found.results, found.inputs)
            form = shared_form(own, self.full, sizes)
            if form is None or (found.is_convolution and axis != PLAIN):
                return set()
            self.values = max(self.values, found.inputs * (sizes.positions or 1) // self.entries)
            if found.is_convolution:
                rest = map_arg(node.args[1:], env.__getitem__)
                inputs = self.new.call(behind, g), self.new.call(on_patches, env[found.x], *rest)  # type: ignore[misc]
                if found.geometry is not None:
                    self.geometries[inputs[1]] = found.geometry
            else:
                inputs = self.new.call(at_positions, g, *axis, 1), self.new.call(at_positions, env[found.x], *axis)
        self.terms.add_form(f"layer_{self.leaves[found.stored]}", form, inputs)
        self.new.note(node, "layer")
        return {found.weight} if own.bias is None or found.bias is None else {found.weight, found.bias}

    def _as_embedding(self, node: fx.Node, g: Any) -> set[fx.Node]:
        table, index = node.args[:2]
        if table not in self.leaves or not self.terms.used_once(table) or self.axes.get(index) != PLAIN:  # type: ignore[arg-type]
            return set()
        if type(self.posterior) is not DiagonalPosterior:
            return set()
        form = DiagonalEmbedding(self.posterior.variance(self.leaves[table]), self.full)  # type: ignore[index]
        self.terms.add(self.new.emit(f"layer_{self.leaves[table]}", form, (g, self.new.env[index])))  # type: ignore[index]
        self.new.note(node, "layer")
        return {table}  # type: ignore[return-value]

    def _size(self, node: fx.Node) -> int:
        """Entries of a sample."""
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        total = sum(torch.Size(hint(s) for s in p.shape).numel() for p in parts if isinstance(p, Tensor))
        return max(total // self.traced.batch, 1) if node in self.axes else total
