"""Recognise in a traced graph what models write in pieces, before any rule is chosen.

- RMS normalisation written as `x * rsqrt(mean(x²) + ε)` becomes the one op that it is.
- The softmax of attention written as `softmax(scale Q Kᵀ + mask) V` is marked: it is taken at the mean, as in the
  fused op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

AT_MEAN = "propagauss_at_mean"  # in node.meta: the op is evaluated on means, whatever is uncertain in it

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


def recognise(graph: fx.Graph) -> None:
    """Rewrite and mark the graph in place."""
    for node in list(graph.nodes):
        if node.target == aten.mul.Tensor:
            _fold_rms_norm(graph, node)
        elif node.target in _SOFTMAX and _comes_from_product(node) and _goes_to_product(node):
            node.meta[AT_MEAN] = True


def _fold_rms_norm(graph: fx.Graph, node: fx.Node) -> None:
    factors: Any = node.args
    for x, root in (factors, factors[::-1]):
        eps = _rms_epsilon(x, root)
        if eps is None:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(aten.rms_norm.default, (x, [int(x.meta["val"].shape[-1])], None, eps))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        return


def _rms_epsilon(x: Any, root: Any) -> float | None:
    """`ε` if `root` is `rsqrt(mean(x², last dimension) + ε)`."""
    if not (isinstance(x, fx.Node) and isinstance(root, fx.Node)) or root.target != aten.rsqrt.default:
        return None
    total: Any = root.args[0]
    if total.target not in (aten.add.Tensor, aten.add.Scalar) or not isinstance(total.args[1], float):
        return None
    mean: Any = total.args[0]
    if mean.target != aten.mean.dim or list(mean.args[1]) not in ([-1], [x.meta["val"].dim() - 1]) or not mean.args[2]:
        return None
    square: Any = mean.args[0]
    squared = (square.target == aten.pow.Tensor_Scalar and square.args[1] == 2) or square.target == aten.square.default
    doubled = square.target == aten.mul.Tensor and square.args[0] is square.args[1]
    return total.args[1] if (squared or doubled) and square.args[0] is x else None


def _comes_from_product(node: fx.Node) -> bool:
    """Whether the scores are, up to scaling and masking, a product of two values that depend on the input."""
    current: Any = node.args[0]
    while isinstance(current, fx.Node) and current.target in _BETWEEN:
        operands = [a for a in current.all_input_nodes if _is_float(a)]
        products = [a for a in operands if a.target in _BETWEEN or a.target in _PRODUCTS]
        current = products[0] if products else None
    return isinstance(current, fx.Node) and current.target in _PRODUCTS


def _goes_to_product(node: fx.Node) -> bool:
    """Whether the weights are the left factor of a product."""
    stack = [(node, user) for user in node.users]
    while stack:
        source, user = stack.pop()
        if user.target in _PRODUCTS:
            left = user.args[1] if user.target == aten.baddbmm.default else user.args[0]
            if left is source:
                return True
        elif user.target in _BETWEEN:
            stack.extend((user, further) for further in user.users)
    return False


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()
