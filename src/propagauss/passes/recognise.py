"""Recognise in a traced graph what models write in pieces, before any rule is chosen.

- RMS normalisation written as `x * rsqrt(mean(x²) + ε)` becomes the one op that it is.
- The softmax of attention written as `softmax(scale Q Kᵀ + mask) V` is marked: it is taken at the mean, as in the
  fused op.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from propagauss.nodes import AT_MEAN, argument, is_float, reached, shape_of
from propagauss.rules.matrices.attention import written_out
from propagauss.tracing.trace import Traced

aten = torch.ops.aten


_SOFTMAX = {aten.softmax.int, aten._softmax.default}
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default}
# what may stand between a product of queries and keys, the softmax, and the product with the values
_BETWEEN = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.add.Tensor,
    aten.masked_fill.Scalar,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.dropout.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
}


def recognise(traced: Traced) -> None:
    """Rewrite and mark the graph in place."""
    graph = traced.graph
    from_input = reached(graph, [n for n in traced.inputs if n is not None])
    for node in list(graph.nodes):
        if node.target == aten.mul.Tensor:
            new = _fold_rms_norm(graph, node)
            traced.outputs = [new if o is node else o for o in traced.outputs]
        elif node.target in _SOFTMAX and _comes_from_product(node, from_input) and _values(node, node.users):
            copy = _give_others_a_copy(graph, node)
            traced.outputs = [copy if o is node else o for o in traced.outputs]
            node.meta[AT_MEAN] = True


def release(graph: fx.Graph, uncertain: AbstractSet[fx.Node]) -> None:
    """Let attention weights be uncertain where the values are not: all uncertainty would be lost otherwise."""
    for node in graph.nodes:
        if node.meta.get(AT_MEAN) and not any(v in uncertain for v in _values(node, node.users)):
            del node.meta[AT_MEAN]
        elif node.target == aten.scaled_dot_product_attention.default:
            value = argument(node, 2, "value")
            if value not in uncertain and any(a in uncertain for a in node.all_input_nodes):
                node.target = written_out  # pyright: ignore[reportAttributeAccessIssue]


def _give_others_a_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What else reads the weights, such as an output, gets them with their uncertainty; returns what they get."""
    others = [user for user in node.users if not _values(node, [user])]
    if not others:
        return node
    with graph.inserting_after(node):
        copy = graph.node_copy(node)
    copy.meta = dict(node.meta)
    for user in others:
        user.replace_input_with(node, copy)
    return copy


def _fold_rms_norm(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A product that normalises the rows of one of its factors becomes that; returns what it now is."""
    factors: Any = node.args
    for x, root in (factors, factors[::-1]) if len(factors) == 2 else ():
        eps = _rms_epsilon(x, root)
        if eps is None or shape_of(x) != shape_of(node):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(aten.rms_norm.default, (x, [int(x.meta["val"].shape[-1])], None, eps))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        return new
    return node


def _rms_epsilon(x: Any, root: Any) -> float | None:
    """`ε` if `root` is `rsqrt(mean(x², last dimension, kept) + ε)`."""
    if not _is(root, aten.rsqrt.default) or not isinstance(x, fx.Node):
        return None
    total: Any = root.args[0]
    if not _is(total, aten.add.Tensor, aten.add.Scalar) or total.kwargs or len(total.args) != 2:
        return None
    mean, eps = total.args
    if not isinstance(eps, float) or not _is(mean, aten.mean.dim) or mean.kwargs.get("dtype") is not None:
        return None
    dims, last = argument(mean, 1, "dim"), len(shape_of(x) or ()) - 1
    if dims is None or list(dims) not in ([-1], [last]) or not argument(mean, 2, "keepdim", False):
        return None
    return eps if _is_square(mean.args[0], x) else None


def _is_square(node: Any, x: fx.Node) -> bool:
    if _is(node, aten.pow.Tensor_Scalar):
        return node.args[0] is x and node.args[1] == 2
    return (_is(node, aten.square.default) and node.args[0] is x) or (
        _is(node, aten.mul.Tensor) and all(a is x for a in node.args)
    )


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in targets


def _comes_from_product(node: fx.Node, from_input: set[fx.Node]) -> bool:
    """Whether the scores are, up to scaling and masking, a product of two values that depend on the input.

    A product with a parameter is a linear layer: the softmax of that is no attention, as in a mixture of experts.
    """
    stack: list[fx.Node] = [a for a in node.all_input_nodes if is_float(a)]
    while stack:
        current = stack.pop()
        if current.target in _PRODUCTS:
            factors = current.args[1:3] if current.target == aten.baddbmm.default else current.args[:2]
            if len(factors) == 2 and all(f in from_input for f in factors):
                return True
        if current.target in _BETWEEN:
            stack.extend(a for a in current.all_input_nodes if is_float(a))
        elif current.target == aten.baddbmm.default:  # what is added may be the product
            stack.extend(a for a in current.args[:1] if isinstance(a, fx.Node))
    return False


def _values(node: fx.Node, users: Iterable[fx.Node]) -> list[Any]:
    """The right factors of the products whose left factor are these weights, as far as `users` lead there."""
    found = []
    stack = [(node, user) for user in users]
    while stack:
        source, user = stack.pop()
        if user.target in _PRODUCTS:
            batched = user.target == aten.baddbmm.default
            left = argument(user, *((1, "batch1") if batched else (0, "self")))
            if left is source:
                found.append(argument(user, *((2, "batch2") if batched else (1, "other"))))
        elif user.target in _BETWEEN:
            stack.extend((user, further) for further in user.users)
    return found
