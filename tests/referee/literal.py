"""The diagonal mode, evaluated literally: every op gives `var_k = Σ_args Σ_i J_ki² v_i`, `J` by automatic differentiation.

An interpreter of the exported graph that knows nothing of the library's rules. What it does beyond that one sentence
are the statements that the library makes about its diagonal mode:

- elementwise functions of one value are one function of it (`h * sigmoid(h)`), and so is what returns its input as it
  is (evaluation-mode dropout, `contiguous`, ...);
- normalisation holds the statistics of a row fixed;
- a value used twice by one op is one value; weight and bias of a layer may depend on each other;
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
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.node import map_arg

from referee.truth import Statement, stating

aten = torch.ops.aten
Value = Any  # a tensor, a size, or a tuple of tensors
_FORGOTTEN = {  # elementwise, but not tagged so by PyTorch
    aten.hardswish.default,
    aten.log_sigmoid.default,
    aten.rrelu.default,
    aten.selu.default,
    aten.celu.default,
}
_IDENTITIES = {
    *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.contiguous.default),
    *(aten.feature_alpha_dropout.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default),
    *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.view.default),
    *(aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.type_as.default, aten.copy.default),
}
_LAYERS = {  # ops that read weight and bias together
    *(aten.linear.default, aten.addmm.default, aten.matmul.default, aten.mm.default, aten.batch_norm.default),
    *(getattr(aten, f"conv{n}d").default for n in (1, 2, 3)),
    *(getattr(aten, f"conv_transpose{n}").default for n in ("1d",)),
    *(getattr(aten, f"conv_transpose{n}").input for n in ("2d", "3d")),
}
_DIFFERENTIABLE = {aten.copy.default: lambda old, new, *_: new.expand_as(old).to(old.dtype)}  # what has no derivative
_NORMS = {aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default, aten.instance_norm.default}


def literal(
    model: nn.Module, inputs: tuple[Tensor, ...], names: list[str], covariance: Tensor, what: Statement = "diagonal"
) -> list[tuple[Tensor, Tensor]]:
    """Mean and variances of every float output."""
    with stating(what), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, inputs, strict=False)
        if any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in program.graph.nodes):
            program = program.run_decompositions({})
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
        self.program, self.starts, self.covariance = program, starts, covariance
        self.mean: dict[fx.Node, Value] = {}
        self.variance: dict[fx.Node, Any] = {}
        self.parameter: dict[fx.Node, str] = {}
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
                self.parameter[node] = name
                marginal = covariance.diagonal()[starts[name]]
                self._start(node, marginal.reshape(self.mean[node].shape))

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
        elif node.target in _NORMS and self._normalises(node):
            self._start(node, self._normalised(node))
        elif self._is_elementwise(node, random):
            self._elementwise(node, random)
        else:
            self._start(node, self._propagated(node, random))

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
            target: Any = _DIFFERENTIABLE.get(node.target, node.target)
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
        joint = [i for i, s in enumerate(sources) if s in self.parameter and node.target in _LAYERS]
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
            index = torch.cat([torch.arange(s.start, s.stop) for i in joint for s in [self._slice(sources[i])]])
            block = self.covariance[index][:, index]
            j = torch.cat([flat[i] for i in joint], dim=1)
            total = total + ((j @ block) * j).sum(1)
        return total

    def _slice(self, source: fx.Node) -> slice:
        return self.starts[self.parameter[source]]

    # -- elementwise functions of one value

    def _is_elementwise(self, node: fx.Node, random: list[fx.Node]) -> bool:
        target: Any = node.target
        tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        known = tagged or target in _FORGOTTEN or target in _IDENTITIES
        shape = getattr(self.mean[node], "shape", None)
        alike = all(self.mean[a].shape == shape and a in self.slopes for a in random)
        return known and alike and (target not in _IDENTITIES or torch.equal(self.mean[random[0]], self.mean[node]))

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

    # -- normalisation

    def _normalises(self, node: fx.Node) -> bool:
        return node.target != aten.instance_norm.default or bool(node.args[5])

    def _normalised(self, node: fx.Node) -> Tensor:
        """`Var[w u + b] = (w / σ)² v + u² V_w + V_b`, with `u = (x - μ) / σ` and `μ`, `σ` those of the mean."""
        x, weight, bias, unit = self._norm_arguments(node)
        total = torch.zeros_like(self.mean[node])
        lift = (-1, *[1] * (unit.dim() - 2)) if node.target in _PER_CHANNEL else ()

        def shaped(t: Tensor) -> Tensor:
            return t.reshape(lift) if lift else t

        w = shaped(self.mean[weight]) if weight is not None else torch.ones((), dtype=unit.dtype)
        if x in self.variance:
            total = total + self.variance[x] * (self._gain(node) * w).square()
        if weight in self.variance:
            total = total + unit.square() * shaped(self.variance[weight])
        if bias in self.variance:
            total = total + shaped(self.variance[bias])
        if weight in self.parameter and bias in self.parameter:
            cross = self.covariance[self._slice(weight), self._slice(bias)].diagonal()
            total = total + 2 * unit * shaped(cross.reshape(self.mean[weight].shape))
        return total

    def _norm_arguments(self, node: fx.Node) -> tuple[Any, Any, Any, Tensor]:
        at = {aten.instance_norm.default: (1, 2), aten.rms_norm.default: (2, None)}.get(node.target, (2, 3))
        weight, bias = (node.args[i] if i is not None and len(node.args) > i else None for i in at)
        args = list(map_arg(node.args, lambda a: self.mean[a]))
        for i in at:
            if i is not None and i < len(args):
                args[i] = None
        target: Any = node.target
        return node.args[0], weight, bias, target(*args, **node.kwargs)

    def _gain(self, node: fx.Node) -> Tensor:
        """`1 / σ`, entry by entry: how far the normalised value moves with the input when `μ` and `σ` do not."""
        x: Any = self.mean[node.args[0]]  # pyright: ignore[reportArgumentType]
        *_, unit = self._norm_arguments(node)
        if node.target == aten.rms_norm.default:
            return unit / x
        rows = x.flatten(2) if node.target == aten.instance_norm.default else x
        shape: Any = node.args[1]
        if node.target == aten.group_norm.default:
            rows = x.reshape(x.shape[0], shape, -1)
        dims = tuple(range(-len(shape), 0)) if node.target == aten.layer_norm.default else (-1,)
        return unit / (rows - rows.mean(dims, keepdim=True)).reshape(x.shape)


_PER_CHANNEL = {aten.group_norm.default, aten.instance_norm.default}


def _parts(value: Value) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _jacobian(run: Callable[..., tuple[Tensor, ...]], at: tuple[Tensor, ...]) -> Any:
    """All rows at once where the op can be vectorised, one by one where it cannot."""
    places = tuple(range(len(at)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.func.jacrev(run, argnums=places)(*at)
    except RuntimeError:
        return torch.func.jacrev(run, argnums=places, chunk_size=1)(*at)
