"""The diagonal mode, evaluated literally: every op gives `var_k = Σ_args Σ_i J_ki² v_i`, `J` by differentiation.

An interpreter of the traced graph that knows nothing of the library's rules. What it does beyond that one sentence
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
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

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
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    with stating(what):
        graph = _graph(model, state, inputs)
    starts, at = {}, 0
    for name in names:
        starts[name], at = slice(at, at + state[name].numel()), at + state[name].numel()
    return Interpreter(graph, state, inputs, starts, covariance).run()


def _graph(model: nn.Module, state: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """The ops that a model calls, as a function of `state` and `inputs`; none is in place, recurrent layers are steps.

    The ops are those of torch.export, in a fraction of its time: no sizes are left open, and nothing is to be saved.
    """

    def run(state: dict[str, Tensor], *inputs: Tensor) -> Any:
        return torch.func.functional_call(model, state, inputs)

    made = _made(run, state, inputs)
    if any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in made.graph.nodes):
        made = _made(dispatch_functionalize(run, FunctionalTensorMode(pre_dispatch=True, export=True)), state, inputs)
        made.graph.eliminate_dead_code()
    return made


def _made(run: Callable[..., Any], state: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    steps = get_decompositions(list(RECURRENT)) | CELLS
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        copies = {n: t.clone() for n, t in state.items()}, *(x.clone() for x in inputs)  # the model may change them
        return make_fx(run, decomposition_table=steps, pre_dispatch=True)(*copies)


class Interpreter:
    """Means and variances of every node, in graph order; no entry in `variance` means deterministic."""

    def __init__(
        self,
        module: fx.GraphModule,
        state: dict[str, Tensor],
        inputs: tuple[Tensor, ...],
        starts: dict[str, slice],
        covariance: Tensor,
    ):
        self.module, self.covariance = module, covariance
        self.mean: dict[fx.Node, Value] = {}
        self.variance: dict[fx.Node, Any] = {}
        self.places: dict[fx.Node, Tensor] = {}  # of a parameter: where its entries are in the covariance
        self.slopes: dict[fx.Node, dict[fx.Node, Tensor]] = {}  # of an elementwise function, from each ancestor
        self.complex: dict[fx.Node, list[fx.Node]] = {}  # a complex value, and the real ones that it comes from
        placeholders = module.graph.find_nodes(op="placeholder")
        for node, (name, value) in zip(placeholders, [*state.items(), *enumerate(inputs)], strict=True):
            self.mean[node] = value
            if name in starts:
                self.places[node] = torch.arange(starts[name].start, starts[name].stop).reshape(value.shape)
                self._start(node, covariance.diagonal()[self.places[node]])

    def run(self) -> list[tuple[Tensor, Tensor]]:
        for node in self.module.graph.nodes:
            if node.op == "get_attr":  # a tensor that the model holds as neither parameter nor buffer
                self.mean[node] = getattr(self.module, node.target)
            elif node.op == "call_function":
                self._call(node)
        outputs = pytree.tree_leaves(self.module.graph.output_node().args[0])
        means = [(r, self.mean[r]) for r in outputs if isinstance(r, fx.Node)]
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
        value = self.mean[node]
        if isinstance(value, Tensor) and not value.numel():
            return torch.zeros_like(value)
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
        if isinstance(value, Tensor):
            return next(found).reshape(value.shape)
        return [next(found).reshape(p.shape) if _is_number(p) else None for p in value]

    def _squared(self, rows: Any, sources: list[fx.Node], joint: list[int], at: tuple[Tensor, ...]) -> Tensor:
        flat = [r.reshape(r.shape[: r.dim() - a.dim()].numel(), a.numel()) for r, a in zip(rows, at, strict=True)]
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
