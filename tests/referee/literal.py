"""The diagonal mode, evaluated literally: every op gives `var_k = Σ_args Σ_i J_ki² v_i`, `J` by differentiation.

An interpreter of the exported graph that knows nothing of the library's rules. What it does beyond that one sentence
are the statements that the library makes about its diagonal mode:

- elementwise functions of one value are one function of it (`h * sigmoid(h)`), and so is what returns its input as it
  is (evaluation-mode dropout, `contiguous`, ...);
- normalisation holds the statistics of a row fixed;
- a value used twice by one op is one value; weight and bias of a layer may depend on each other;
- recurrent layers are unrolled, and their steps are ops like any others;
- complex values are steps on the way from real values to real values.

What is held at its mean (queries and keys of attention) arrives as `detach`: see `truth.stating`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_arg

from referee.statements import (
    CELLS,
    DIFFERENTIABLE,
    IDENTITIES,
    RECURRENT,
    TRANSPOSES,
    is_elementwise,
    is_layer,
    is_row_norm,
    normalised,
)
from referee.truth import Statement, stating

aten = torch.ops.aten
Value = Any  # a tensor, a size, or a tuple of tensors


def literal(
    model: nn.Module, inputs: tuple[Tensor, ...], names: list[str], covariance: Tensor, what: Statement = "diagonal"
) -> list[tuple[Tensor, Tensor]]:
    """Mean and variances of every float output."""
    with stating(what), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, inputs, strict=False)
        if any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in program.graph.nodes):
            program = program.run_decompositions({})
        if any(n.target in RECURRENT or n.target in CELLS for n in program.graph.nodes):
            steps = get_decompositions(list(RECURRENT)) | CELLS
            program = program.run_decompositions(steps)
    sizes = {n: p.numel() for n, p in model.named_parameters() if n in names}
    starts, at = {}, 0
    for name in names:
        starts[name], at = slice(at, at + sizes[name]), at + sizes[name]
    canonical = {id(p): n for n, p in model.named_parameters()}
    return Interpreter(program, inputs, starts, covariance, lambda target: canonical.get(id(_get(model, target)))).run()


def _get(model: nn.Module, target: str) -> Any:
    value: Any = model
    for part in target.split("."):
        value = getattr(value, part)
    return value


class Interpreter:
    """Means and variances of every node, in graph order; no entry in `variance` means deterministic."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        inputs: tuple[Tensor, ...],
        starts: dict[str, slice],
        covariance: Tensor,
        name_of: Callable[[str], str | None],
    ):
        self.program, self.covariance = program, covariance
        self.mean: dict[fx.Node, Value] = {}
        self.variance: dict[fx.Node, Any] = {}
        self.places: dict[fx.Node, Tensor] = {}  # of a parameter: where its entries are in the covariance
        self.slopes: dict[fx.Node, dict[fx.Node, Tensor]] = {}  # of an elementwise function, from each ancestor
        self.complex: dict[fx.Node, list[fx.Node]] = {}  # a complex value, and the real ones that it comes from
        given = iter(inputs)
        entries = {e.arg.name: e for e in program.graph_signature.input_specs}
        for node in (n for n in program.graph.nodes if n.op == "placeholder"):
            entry = entries[node.name]
            if entry.kind == InputKind.USER_INPUT:
                self.mean[node] = next(given)
                continue
            target = str(entry.target)
            store: Any = program.state_dict if target in program.state_dict else program.constants
            self.mean[node] = store[target].detach()
            name = name_of(target) if entry.kind == InputKind.PARAMETER else None
            if name in starts:
                places = torch.arange(starts[name].start, starts[name].stop).reshape(self.mean[node].shape)
                self.places[node] = places
                self._start(node, covariance.diagonal()[places])

    def run(self) -> list[tuple[Tensor, Tensor]]:
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        (results,) = next(n for n in self.program.graph.nodes if n.op == "output").args
        kinds = [e.kind for e in self.program.graph_signature.output_specs]
        wanted = [r for r, kind in zip(results, kinds, strict=True) if kind == OutputKind.USER_OUTPUT]
        means = [(r, self.mean[r]) for r in wanted if isinstance(r, fx.Node)]
        return [
            (m, self.variance.get(r, torch.zeros_like(m)))
            for r, m in means
            if isinstance(m, Tensor) and m.is_floating_point()
        ]

    # -- one op

    def _call(self, node: fx.Node) -> None:
        self.mean[node] = value = self._evaluate(node, self.mean)
        random = [a for a in node.all_input_nodes if a in self.variance or a in self.complex]
        if not random or node.target == aten.detach.default or not any(map(_is_number, _parts(value))):
            return
        if node.target is operator.getitem and random[0] in self.variance:
            found = self.variance[random[0]][node.args[1]]
            if found is not None:
                self._start(node, found)
        elif isinstance(value, Tensor) and value.is_complex():
            self.complex[node] = self._real_sources(random)
        elif any(a in self.complex for a in random):
            self._start(node, self._propagated(node, self._real_sources(random)))
        elif is_row_norm(node):
            self._start(node, normalised(node, self.mean, self.variance, self.places, self.covariance))
        elif self._is_elementwise(node, random):
            self._elementwise(node, random)
        else:
            self._start(node, self._propagated(node, random))
        if node.target in TRANSPOSES and random[0] in self.places:
            self.places[node] = self._evaluate(node, {random[0]: self.places[random[0]]})

    def _start(self, node: fx.Node, variance: Any) -> None:
        self.variance[node] = variance
        if isinstance(variance, Tensor):
            self.slopes[node] = {node: torch.ones_like(variance)}

    def _real_sources(self, random: list[fx.Node]) -> list[fx.Node]:
        return list(dict.fromkeys(s for a in random for s in self.complex.get(a, [a])))

    def _evaluate(self, node: fx.Node, values: dict[fx.Node, Value]) -> Value:
        args: Any = map_arg(node.args, lambda a: values[a])
        kwargs: Any = map_arg(node.kwargs, lambda a: values[a])
        with torch.no_grad() if values is self.mean else torch.enable_grad():
            target: Any = DIFFERENTIABLE.get(node.target, node.target)
            return target(*args, **kwargs)

    def _between(self, node: fx.Node, sources: list[fx.Node]) -> list[fx.Node]:
        """The complex values from `sources` to `node`, and `node`, in graph order."""
        found, stack = {node}, [node]
        while stack:
            for a in stack.pop().all_input_nodes:
                if a in self.complex and a not in found:
                    found.add(a)
                    stack.append(a)
        return [n for n in node.graph.nodes if n in found]

    def _propagated(self, node: fx.Node, sources: list[fx.Node]) -> Any:
        """`Σ_sources Σ_i J_ki² v_i`, for every output of the op; parameters of a layer with their joint covariance."""
        inside = self._between(node, sources)

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            env = self.mean | dict(zip(sources, values, strict=True))
            for inner in inside:
                env[inner] = self._evaluate(inner, env)
            return tuple(p for p in _parts(env[node]) if _is_number(p))

        at = tuple(self.mean[s] for s in sources)
        jacobians = _jacobian(run, at)
        joint = [i for i, s in enumerate(sources) if s in self.places and is_layer(node, s)]
        found = iter([self._squared(rows, sources, joint, at) for rows in jacobians])
        value = self.mean[node]
        if isinstance(value, Tensor):
            return next(found).reshape(value.shape)
        return [next(found).reshape(p.shape) if _is_number(p) else None for p in value]

    def _squared(self, rows: Any, sources: list[fx.Node], joint: list[int], at: tuple[Tensor, ...]) -> Tensor:
        flat = [r.reshape(-1, a.numel()) for r, a in zip(rows, at, strict=True)]
        total = flat[0].new_zeros(flat[0].shape[0])
        for i, (j, source) in enumerate(zip(flat, sources, strict=True)):
            if i not in joint:
                total = total + j.square() @ self.variance[source].flatten()
        if joint:
            index = torch.cat([self.places[sources[i]].flatten() for i in joint])
            block = self.covariance[index][:, index]
            j = torch.cat([flat[i] for i in joint], dim=1)
            total = total + ((j @ block) * j).sum(1)
        return total

    # -- elementwise functions of one value

    def _is_elementwise(self, node: fx.Node, random: list[fx.Node]) -> bool:
        """Whether the op is elementwise, and all that is random in it has the shape of its result."""
        shape = getattr(self.mean[node], "shape", None)
        alike = all(self.mean[a].shape == shape and a in self.slopes for a in random)
        changed = node.target in IDENTITIES and not torch.equal(self.mean[random[0]], self.mean[node])
        return is_elementwise(node.target) and alike and not changed

    def _elementwise(self, node: fx.Node, random: list[fx.Node]) -> None:
        def run(*values: Tensor) -> Tensor:
            return self._evaluate(node, self.mean | dict(zip(random, values, strict=True))).sum()

        partial = torch.func.grad(run, argnums=tuple(range(len(random))))(*(self.mean[a] for a in random))
        common = [s for s in self.slopes[random[0]] if all(s in self.slopes[a] for a in random)]
        if not common:
            self._start(node, sum(p.square() * self.variance[a] for p, a in zip(partial, random, strict=True)))
            return
        chained = {
            s: sum((p * self.slopes[a][s] for p, a in zip(partial, random, strict=True)), torch.zeros(()))
            for s in common
        }
        nearest = common[0]
        self.variance[node] = chained[nearest].square() * self.variance[nearest]
        self.slopes[node] = {node: torch.ones_like(self.mean[node])} | chained


def _parts(value: Value) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _jacobian(run: Callable[..., tuple[Tensor, ...]], at: tuple[Tensor, ...]) -> Any:
    """Row by row: vectorised derivatives of some ops (`cdist`, torch 2.13) are wrong."""
    return torch.func.jacrev(run, argnums=tuple(range(len(at))), chunk_size=1)(*at)
