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
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from propagauss.gaussian import mean_of
from propagauss.network.linearised import Linearised, Sensitivities
from propagauss.network.plan import Plan, Step
from propagauss.nodes import (
    depends,
    hint,
    is_assertion,
    is_float,
    module_path,
    op_name,
)
from propagauss.passes.backwards.arguments import has_complex, has_derivative, is_several, paths, value_type
from propagauss.passes.backwards.choice import Choice, ChosenRows, Seeds
from propagauss.passes.backwards.layers import at_positions, behind, layer, on_patches
from propagauss.passes.backwards.results import of_input, seed, seed_unless_whole, weight_rows
from propagauss.passes.backwards.samples.axes import PLAIN, apart, axes, fronted
from propagauss.passes.backwards.samples.layout import observed
from propagauss.passes.backwards.shortcuts.averages import factor_averages
from propagauss.passes.backwards.shortcuts.gates import move_gates
from propagauss.passes.backwards.shortcuts.images import read_images, tile_adjoints
from propagauss.passes.backwards.suitable import check_batch, check_keywords, check_numbers, check_outputs, check_size
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.roots import joint_root, own_root
from propagauss.rules.adjoints.forms import DiagonalEmbedding, gram, independent, layer_form, squares
from propagauss.rules.adjoints.positions import Sizes, shared_form
from propagauss.rules.adjoints.registry import ADJOINTS, PER_SAMPLE, PREPARED, pulled_back, pulled_back_per_sample
from propagauss.rules.adjoints.shifts import Geometry
from propagauss.tracing.trace import Traced

aten = torch.ops.aten
# per-sample adjoints that read the last dimension alone, or the trailing ones: samples may be anywhere before them
_ROWS = {aten.linear.default, aten.addmm.default, aten.layer_norm.default, aten.rms_norm.default}


class Sweep:
    """Builds the graph of one forward and, for every uncertain output, one backward walk."""

    def __init__(self, traced: Traced, posterior: Posterior | None, full: bool, choice: Choice | None = None):
        self.traced, self.posterior, self.full, self.choice = traced, posterior, full, choice
        self.chosen: Seeds | None = None  # where the walk from some outputs starts
        self.root, self.graph = nn.Module(), fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        names = set() if posterior is None else set(posterior.names)
        self.leaves = {
            n: traced.parameters[n.name]
            for n in traced.graph.nodes
            if n.op == "placeholder" and traced.parameters.get(n.name) in names
        }
        self.axes = observed(traced, axes(traced))
        self.active = self._active()
        self.sensitivity: dict[fx.Node, Any] = {}
        self.shared: dict[str, fx.Node] = {}  # Jacobians of parameters with several uses, so far
        self.jacobians: dict[str, fx.Node] = {}  # and of those that depend on each other
        self.terms: list[fx.Node] = []
        self.entries = 1  # of the output, for each sample
        self.values = 0  # entries of the largest sensitivities so far, for one sample and one entry of the output
        self.kept = 0  # entries of Jacobians that are kept to the end
        self.ready: dict[fx.Node, fx.Node] = {}  # what the adjoints of all arguments of an op need
        self.geometries: dict[fx.Node, Geometry] = {}  # of the patches that convolutions meet
        self.walks: dict[int, Sensitivities] = {}
        self.steps: dict[fx.Node, Step] = {}

    def run(self) -> Linearised:
        check_numbers(self.traced, self.active)
        check_batch(self.traced, self.active, self.axes)
        check_keywords(self.traced, self.active)
        check_outputs(self.traced, self.active, self.axes)
        self._forward()
        self.graph.output(tuple(self._result(i, output) for i, output in enumerate(self.traced.outputs)))
        move_gates(self.graph, self.root)
        factor_averages(self.graph, self.root)
        read_images(self.graph, self.root, self.geometries)
        tile_adjoints(self.graph, self.root, self.entries)
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        body = fx.GraphModule(self.root, self.graph, class_name="LinearisedBody")
        body.delete_all_unused_submodules()
        for i in self.walks:  # what parts of an output are taken from, also where the graph need not read it
            setattr(body, f"whole_{i}", getattr(self.root, f"whole_{i}"))
        untouched = sum(n.op == "call_function" and n not in self.active for n in self.traced.graph.nodes)
        notes = () if self.choice is None else (self.choice.note,)
        plan = Plan(tuple(self.steps.values()), untouched, tuple(sorted(set(self.leaves.values()))), notes)
        return Linearised(body, plan, self.traced, self.walks, "full" if self.full else "diagonal").eval()

    # -- forwards: the model itself

    def _forward(self) -> None:
        for node in self.traced.inputs:
            if node is not None:
                self.env[node] = self.graph.placeholder(node.name)
        self.given = {n: v for n, v in self.env.items() if n in self.active}
        uncertain = [i for i, o in enumerate(self.traced.outputs) if o in self.active]
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

    def _active(self) -> set[fx.Node]:
        """All values that are uncertain."""
        inputs = zip(self.traced.inputs, self.traced.uncertain_inputs, strict=True)
        found = {*self.leaves, *(n for n, uncertain in inputs if uncertain and n is not None)}
        for node in self.traced.graph.nodes:
            if any(a in found for a in node.all_input_nodes) and has_derivative(node):
                found.add(node)
        return found

    # -- backwards

    def _result(self, i: int, output: Any) -> Any:
        if not isinstance(output, fx.Node) or not is_float(output):
            return self.env[output] if isinstance(output, fx.Node) else output
        event = [hint(s) for s in output.meta["val"].shape[1:]]
        if self.choice is not None:
            self.chosen = Seeds(self.graph, self.root, self.choice, self.env[output], event, i)
        index = () if self.chosen is None else (self.chosen.index,)
        if output not in self.active:
            return self.env[output], None, *index
        self.entries = math.prod(event) if self.chosen is None else self.chosen.rows
        widest = max(self._size(n) for n in self.active if n in self.axes)
        check_size(output, self.entries, widest, self.choice is not None)
        start = self._seed(i, output)
        self.values = self.kept = 0
        self.sensitivity, self.shared, self.jacobians, self.terms = {output: start}, {}, {}, []
        for node in reversed(list(self.traced.graph.nodes)):
            g = self.sensitivity.pop(node, None)
            if g is not None:
                self._arrive(node, g, g is start)
                if g is start and self.chosen is not None and not start.users:
                    # rows of a weight took the place of the seeds
                    self.values = max(3 * self._size(a) for _, a in paths(node) if a in self.active) + self.kept
        for name, rows in self.shared.items():
            self._finish(name, rows)
        self._finish_together()
        total = self.terms[0]
        for term in self.terms[1:]:
            total = self._sum(total, term)
        self.walks[i] = Sensitivities(self.entries, self.values, output.meta["val"].dtype)
        other = next((n for n in (*self.leaves, *self.given) if value_type(n) != value_type(output)), output)
        return self.env[output], self._in_type_of(output, other, total), *index

    def _seed(self, i: int, output: fx.Node) -> fx.Node:
        if self.chosen is not None:
            return self.chosen.begin(self.seeds[i])
        event = [hint(s) for s in output.meta["val"].shape[1:]]
        eye = torch.eye(math.prod(event), dtype=output.meta["val"].dtype)
        self.root.register_buffer(f"whole_{i}", eye)
        whole = self.graph.get_attr(f"whole_{i}")
        return self.graph.call_function(seed, (self.seeds[i], whole, self.env[output], event))

    def _start(self, output: fx.Node) -> fx.Node:
        """The same for a layer at the output, which takes None for the identity."""
        event = [hint(s) for s in output.meta["val"].shape[1:]]
        return self._call(seed_unless_whole, self.seeds[self.traced.outputs.index(output)], self.env[output], event)

    def _arrive(self, node: fx.Node, g: Any, is_identity: bool) -> None:
        if node in self.leaves:
            self._collect(node, g)
        elif node in self.given:
            self.terms.append(self.graph.call_function(of_input, (g, self.given[node], self.full)))
        elif node.target is operator.getitem and is_several(node.args[0]):
            self._put_part(node.args[0], node.args[1], g)  # type: ignore[arg-type]
        else:
            self.values = max(self.values, 3 * self._size(node))
            done = self._as_layer(node, g, is_identity)
            for path, argument in paths(node):
                if argument in self.active and argument not in done:
                    self.values = max(self.values, 3 * self._size(argument) + self.kept)
                    pulled = self._in_type_of(argument, node, self._pulled(node, g, path, argument, is_identity))
                    if argument in self.leaves and self._used_once(argument):
                        self._finish(self.leaves[argument], pulled)  # at once: one layer's Jacobian at a time
                    else:
                        self._add(argument, pulled)

    def _collect(self, leaf: fx.Node, g: fx.Node) -> None:
        """A parameter with several uses; the graph may have it under several names."""
        name = self.leaves[leaf]
        self.shared[name] = g if name not in self.shared else self._sum(self.shared[name], g)

    def _put_part(self, node: fx.Node, index: int, g: Any) -> None:
        """A part of a result in several parts, whose sensitivities are a list."""
        parts = self.sensitivity.setdefault(node, [None] * len(node.meta["val"]))
        index %= len(parts)
        parts[index] = g if parts[index] is None else self._sum(parts[index], g)

    def _add(self, node: fx.Node, g: fx.Node) -> None:
        old = self.sensitivity.get(node)
        self.sensitivity[node] = g if old is None else self._sum(old, g)

    def _pulled(self, node: fx.Node, g: Any, path: tuple[int, ...], argument: fx.Node, is_identity: bool) -> fx.Node:
        if is_identity and self.chosen is not None and node.target == aten.linear.default and path == (0,):
            self._note(node, "adjoint")
            return self.chosen.through(self.env[node.args[1]])  # type: ignore[index]
        if is_identity and node.target == aten.linear.default and path == (0,) and node.meta["val"].dim() == 2:
            self._note(node, "adjoint")
            seeds = self.seeds[self.traced.outputs.index(node)]
            return self._call(weight_rows, seeds, self.env[node.args[1]], self.env[node])  # type: ignore[index]
        args, kwargs = map_arg((node.args, node.kwargs), self.env.__getitem__)  # type: ignore[misc]
        at: Any = path[0] if len(path) == 1 else path
        y: Any = self.env[node]
        op: Any = node.target
        if node in self.axes and argument not in self.axes:
            return self._crossing(node, g, path, args, kwargs)
        found = None if has_complex(node) else ADJOINTS.get(op)  # written for real numbers
        self._note(node, "automatic" if found is None else "adjoint")
        if found is not None:
            if op in PREPARED:
                if node not in self.ready:
                    self.ready[node] = self.graph.call_function(PREPARED[op], args, kwargs)
                kwargs = kwargs | {"ready": self.ready[node]}
            return self.graph.call_function(found, (g, at, y, *args), kwargs)
        return self.graph.call_function(pulled_back, (g, path, op, y, *args), kwargs)

    def _crossing(self, node: fx.Node, g: Any, path: tuple[int, ...], args: Any, kwargs: Any) -> fx.Node:
        """From a value with samples to one that all samples share: its sensitivity is kept apart for each of them."""
        op, axis = node.target, self.axes[node]
        inputs = {i: self.axes[a] for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a in self.axes}
        found = None if has_complex(node) else PER_SAMPLE.get(op)
        first = axis == PLAIN
        fits = all(a == axis for a in inputs.values()) and (first or op in _ROWS) if inputs else first
        if found is not None and fits:
            self._note(node, "adjoint")
            y, moved = self.env[node], list(args)
            if not first:
                g, y = self._call(fronted, g, *axis, 1), self._call(fronted, y, *axis)
                for i, a in inputs.items():
                    moved[i] = self._call(fronted, args[i], *a)
            return self.graph.call_function(found, (g, path[0] if len(path) == 1 else path, y, *moved), kwargs)
        self._note(node, "automatic")
        moved, dims = zip(*(self._apart(a, v) for a, v in zip(node.args, args, strict=True)), strict=True)
        parts = [None if p is None else self._call(apart, p, *axis, 1) for p in g] if isinstance(g, list) else None
        g = self._call(apart, g, *axis, 1) if parts is None else parts
        call: Any = (g, path, op, dims, axis.dim, self.env[node], *moved)
        return self.graph.call_function(pulled_back_per_sample, call, kwargs)

    def _apart(self, argument: Any, value: Any) -> tuple[Any, Any]:
        """An argument with a dimension for samples alone, and which one that is; lists element by element."""
        if isinstance(argument, (list, tuple)):
            pairs = [self._apart(a, v) for a, v in zip(argument, value, strict=True)]
            return [v for v, _ in pairs], [d for _, d in pairs]
        axis = self.axes.get(argument) if isinstance(argument, fx.Node) else None
        return (value, None) if axis is None else (self._call(apart, value, *axis), axis.dim)

    def _as_layer(self, node: fx.Node, g: Any, is_identity: bool) -> set[fx.Node]:
        """A layer that adds its part at once; returns the parameters that are done with it."""
        if node.target == aten.embedding.default:
            return self._as_embedding(node, g)
        found = layer(node, lambda n: n in self.leaves and self._used_once(n))
        if found is None or self.posterior is None or self.axes.get(found.x) != self.axes.get(node, ()):
            return set()
        axis, env = self.axes[node], self.env
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
                inputs = self._call(behind, g), self._call(on_patches, env[found.x], *rest)  # type: ignore[misc]
                if found.geometry is not None:
                    self.geometries[inputs[1]] = found.geometry
            else:
                inputs = self._call(at_positions, g, *axis, 1), self._call(at_positions, env[found.x], *axis)
        total = (self.terms.pop(),) if self.terms else ()
        self.terms.append(self._emit(f"layer_{self.leaves[found.stored]}", form, (*inputs, *total)))
        self._note(node, "layer")
        return {found.weight} if own.bias is None or found.bias is None else {found.weight, found.bias}

    def _as_embedding(self, node: fx.Node, g: Any) -> set[fx.Node]:
        table, index = node.args[:2]
        if table not in self.leaves or not self._used_once(table) or self.axes.get(index) != PLAIN:  # type: ignore[arg-type]
            return set()
        if type(self.posterior) is not DiagonalPosterior:
            return set()
        form = DiagonalEmbedding(self.posterior.variance(self.leaves[table]), self.full)  # type: ignore[index]
        self.terms.append(self._emit(f"layer_{self.leaves[table]}", form, (g, self.env[index])))  # type: ignore[index]
        self._note(node, "layer")
        return {table}  # type: ignore[return-value]

    def _size(self, node: fx.Node) -> int:
        """Entries of a sample."""
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        total = sum(torch.Size(hint(s) for s in p.shape).numel() for p in parts if isinstance(p, Tensor))
        return max(total // self.traced.batch, 1) if node in self.axes else total

    def _used_once(self, leaf: Any) -> bool:
        same = [n for n, name in self.leaves.items() if name == self.leaves[leaf]]
        return len(same) == 1 and sum(a is leaf for user in leaf.users for _, a in paths(user)) == 1

    def _finish(self, name: str, rows: fx.Node) -> None:
        """The part of a parameter that is independent of all others, or its Jacobian, to be kept."""
        assert self.posterior is not None
        root = own_root(self.posterior, name)
        if root is None:
            self.jacobians[name] = rows
            self.kept += 2 * self.posterior.shape(name).numel()
        else:
            self._form(name, root, (rows,))

    def _finish_together(self) -> None:
        if self.jacobians:
            assert self.posterior is not None
            names, root = joint_root(self.posterior, sorted(self.jacobians))
            self._form(names[0], root, tuple(self.jacobians[n] for n in names))

    def _form(self, name: str, root: nn.Module, rows: tuple[fx.Node, ...]) -> None:
        moved = self._emit(f"root_{name}", root, rows)
        self.terms.append(self.graph.call_function(gram if self.full else squares, (moved,)))

    # -- small things

    def _in_type_of(self, wanted: fx.Node, source: fx.Node, value: fx.Node) -> fx.Node:
        """A value with the type of one node in that of another: models compute some steps in a type of their own."""
        to = value_type(wanted)
        return value if value_type(source) == to else self.graph.call_method("to", (value, to))

    def _call(self, function: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(function, args)

    def _sum(self, first: fx.Node, second: fx.Node) -> fx.Node:
        return self.graph.call_function(operator.add, (first, second))

    def _emit(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> fx.Node:
        name = name.replace(".", "_")
        while hasattr(self.root, name):
            name += "_"
        self.root.add_module(name, module)
        return self.graph.call_module(name, inputs)

    def _note(self, node: fx.Node, how: str) -> None:
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
