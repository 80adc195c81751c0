"""The derivative of a function along a deviation, `t -> J t`, as a graph: exact for an affine function.

Written out op by op. For an affine `f` rather than as `f(t) - f(0)`: a deviation that is small beside the constants of
`f` would drown in rounding. For others, where the derivatives of all ops are known here, rather than by forward-mode
differentiation, which evaluates `f` once for every deviation and cannot always be exported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from propagauss.nodes import is_complex, nodes_in
from propagauss.rules.elementwise.slopes import as_slope, tangent_of
from propagauss.rules.facts import facts

aten = torch.ops.aten

# with the sign of the second term
_SUMS = {aten.add.Tensor: 1, aten.add.Scalar: 1, operator.add: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}


def is_affine(function: fx.GraphModule, at: int) -> bool:
    """Whether `f(*values)` is known to be affine in argument `at`."""
    return _along(function, at, _affine) is not None


def along(function: fx.GraphModule, at: int) -> fx.GraphModule | None:
    """From `f(*values)`, `J t` for argument `at` as `(t, *values) -> J t`; None if a derivative is not known here."""
    graph = _along(function, at, _tangent)
    return None if graph is None else fx.GraphModule(function, graph)


def _along(function: fx.GraphModule, at: int, rule: Callable[..., Any]) -> fx.Graph | None:
    graph, env, tangents = fx.Graph(), {}, {}
    moving = graph.placeholder("tangent")
    inputs = [n for n in function.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(inputs):
        env[node] = graph.placeholder(node.name)
        if i == at:
            tangents[node] = moving
    for node in function.graph.nodes:
        if node.op == "output":
            if node.args[0] not in tangents:
                return None
            graph.output(tangents[node.args[0]])
        elif node.op != "placeholder":
            env[node] = graph.node_copy(node, env.__getitem__)
            if any(a in tangents for a in node.all_input_nodes):
                found = rule(graph, node, env, tangents)
                if found is None:
                    return None
                tangents[node] = found
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return graph


def _tangent(graph: fx.Graph, node: fx.Node, env: dict[Any, Any], tangents: dict[Any, Any]) -> Any:
    """The deviation of one op's result, as a node of the new graph."""
    found = _affine(graph, node, env, tangents)
    if found is not None:
        return found
    target: Any = node.target
    args: Any = node.args
    values = map_arg(args, env.__getitem__)
    if target in CLOSED and args[0] in tangents and not any(a in tangents for a in node.all_input_nodes[1:]):
        given = (env[node], tangents[args[0]], *values)
        return graph.call_function(CLOSED[target], given, map_arg(node.kwargs, env.__getitem__))
    moved = [a for a in node.all_input_nodes if a in tangents]
    rule = tangent_of(target)
    if rule is None or any(a not in args for a in moved) or any(map(is_complex, [node, *moved])):
        return None
    each = tuple(tangents.get(a) if isinstance(a, fx.Node) else None for a in args)
    found = graph.call_function(rule, (env[node], values, each), map_arg(node.kwargs, env.__getitem__))
    return graph.call_function(_widened, (env[node], found))


def _widened(y: Tensor, t: Any) -> Tensor:
    return as_slope(y, t).expand(y.shape)


def _softmax(y: Tensor, t: Tensor, x: Tensor, dim: int, *_: Any) -> Tensor:
    return y * (t - (y * t).sum(dim, keepdim=True))


def _log_softmax(y: Tensor, t: Tensor, x: Tensor, dim: int, *_: Any) -> Tensor:
    return t - (y.exp() * t).sum(dim, keepdim=True)


def _layer_norm(
    y: Tensor, t: Tensor, x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    dims = tuple(range(-len(shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    return _normed(centred, t - t.mean(dims, keepdim=True), dims, weight, eps)


def _rms_norm(y: Tensor, t: Tensor, x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _normed(x, t, tuple(range(-len(shape), 0)), weight, eps)


def _normed(x: Tensor, t: Tensor, dims: tuple[int, ...], weight: Any, eps: float) -> Tensor:
    """`w (t - x̂ mean(x̂ t)) / σ`"""
    gain = (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    unit = x * gain
    result = gain * (t - unit * (unit * t).mean(dims, keepdim=True))
    return result if weight is None else result * weight


# (value, deviation of the first argument, *arguments) -> deviation of the value
CLOSED: dict[Any, Callable[..., Tensor]] = {
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _log_softmax,
    aten._log_softmax.default: _log_softmax,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
}


def _affine(graph: fx.Graph, node: fx.Node, env: dict[Any, Any], tangents: dict[Any, Any]) -> Any:
    """The same for an affine op; None for any other."""
    target: Any = node.target
    args: Any = node.args
    kwargs: Any = node.kwargs
    moved = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, fx.Node) and a in tangents]

    def swapped(skip: tuple[int, ...] = ()) -> fx.Node:
        def each(a: fx.Node) -> Any:
            return tangents.get(a, env[a])

        moved_args = tuple(None if i in skip else map_arg(a, each) for i, a in enumerate(args))
        return graph.call_function(target, moved_args, map_arg(kwargs, each))

    def call(function: Callable[..., Any], *given: Any) -> fx.Node:
        return graph.call_function(function, given)

    known = facts(target)
    at = [i for i, a in enumerate(args) if any(n in tangents for n in nodes_in(a))]
    if len(moved) == len(at) == 1 and known.linear_at(at[0]):
        return swapped(() if known.adds is None else (known.adds,))
    if target in _SUMS:
        first, second = (tangents.get(a) if isinstance(a, fx.Node) else None for a in args[:2])
        return call(_summed, env[node], first, second, _SUMS[target] * kwargs.get("alpha", 1))
    if target == aten.addmm.default and len(moved) == 1:
        return graph.call_function(
            _added_product, (at[0], tangents[moved[0]], env[node], *map_arg(args, env.get)), kwargs
        )
    if target == aten.rsub.Scalar:
        return call(_negated, tangents[args[0]], args[2] if len(args) > 2 else 1)
    if known.joins:
        parts = [tangents[p] if p in tangents else call(torch.zeros_like, env[p]) for p in args[0]]
        return graph.call_function(target, (parts, *map_arg(args[1:], env.__getitem__)))
    if target == aten.constant_pad_nd.default and len(moved) == 1:
        return graph.call_function(target, (tangents[args[0]], map_arg(args[1], env.__getitem__), 0))
    if target == aten.masked_fill.Scalar and args[0] in tangents:
        return graph.call_function(target, (tangents[args[0]], env[args[1]], 0))
    if target == aten.where.self and args[0] not in tangents:
        branches = (tangents.get(a) if isinstance(a, fx.Node) else None for a in args[1:])
        return call(_chosen, env[node], env[args[0]], *branches)
    return None


def _summed(like: Tensor, first: Tensor | None, second: Tensor | None, factor: float) -> Tensor:
    total = first
    if second is not None:
        second = second if factor == 1 else second * factor
        total = second if first is None else first + second
    assert total is not None
    return total.to(like.dtype).expand(like.shape)  # of a real term, in a complex sum


def _added_product(
    at: int, t: Tensor, like: Tensor, base: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Of `β b + α x y`, in the argument `at`."""
    factor, moved = (beta, t.expand(like.shape)) if at == 0 else (alpha, t @ y if at == 1 else x @ t)
    return moved if factor == 1 else factor * moved


def _negated(t: Tensor, factor: float) -> Tensor:
    return -factor * t


def _chosen(like: Tensor, condition: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(condition, zero if first is None else first, zero if second is None else second)
