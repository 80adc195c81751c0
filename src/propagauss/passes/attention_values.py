"""`attention="covariance"`: the covariance of values within a head, kept up to the output projection.

A value `v_t = W_V h_t + b` of a token with variances `s_t = Var[h_t]` has `Cov(v_t) = F diag(s_t) Fᵀ + diag(d_t)`
within a head, `F` the rows of `W_V` that make up the head and `d_t` what random weights add. Attention mixes tokens
with fixed weights `P`, so head `j` of token `i` gets `F diag(Σ_t P_it² s_t) Fᵀ + diag(Σ_t P_it² d_t)`, and the output
projection

    Var[y_i] = Σ_j (W_O^j F^j)² (P_j² s)_i + (W_O^j)² (P_j² d)_i     (heads independent, as in the paper)

needs only the squared products `(W_O^j F^j)²`, computed once. No covariance matrix of values is ever formed.

Here is the search for that pattern in a traced graph: a linear layer, moves of entries, attention, moves, a linear
layer. Where it is found, the last layer becomes a call of `linear_after_attention`, whose rule is in
rules/attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.nodes import AT_MEAN, hint
from propagauss.passes.fusion import cut
from propagauss.rules.facts import facts
from propagauss.rules.matrices.attention import linear_after_attention
from propagauss.tracing.trace import Traced

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
_PRODUCTS = {aten.matmul.default, aten.bmm.default}
_AFTER_SOFTMAX = {
    aten.dropout.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.clone.default,
    aten.contiguous.default,
}


@dataclass(frozen=True)
class Layer:
    """A linear layer of the graph: its node, and the arguments that are its input, weight and bias."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    flipped: bool  # multiplies by the weight rather than by its transpose

    @staticmethod
    def read(node: fx.Node) -> Layer | None:
        args: Any = node.args
        if node.target == aten.linear.default:
            return Layer(node, args[0], args[1], args[2] if len(args) > 2 else None, False)
        if node.target == aten.addmm.default and not node.kwargs:
            return Layer(node, args[1], args[2], args[0], True)
        return None


def keep_value_covariance(traced: Traced) -> None:
    """Replace, in place, the output projections of all attention blocks where the pattern is found."""
    for node in list(traced.graph.nodes):
        if node.target == ATTENTION or (
            node.target in (aten.matmul.default, aten.bmm.default) and _is_weights(node.args[0])
        ):
            value, output = _layer_before(_values(node)), _layer_after(node)
            new = None if value is None or output is None else _replace(traced, node, value, output)
            if new is not None and output is not None:
                traced.outputs = [new if o is output.node else o for o in traced.outputs]


def _is_weights(node: Any) -> bool:
    """Whether a value is the softmax of attention written in pieces, up to dropout and casts."""
    while isinstance(node, fx.Node) and node.target in _AFTER_SOFTMAX:
        node = node.args[0]
    return isinstance(node, fx.Node) and bool(node.meta.get(AT_MEAN))


def _values(attention: fx.Node) -> Any:
    return attention.args[2 if attention.target == ATTENTION else 1]


def _layer_before(node: Any) -> Layer | None:
    while isinstance(node, fx.Node) and _only_moves(node):
        node = node.args[0]
    return Layer.read(node) if isinstance(node, fx.Node) else None


def _layer_after(node: fx.Node) -> Layer | None:
    stack = list(node.users)
    while stack:
        user = stack.pop()
        layer = Layer.read(user)
        if layer is not None:
            return layer
        if _only_moves(user):
            stack.extend(user.users)
    return None


def _only_moves(node: fx.Node) -> bool:
    return facts(node.target).moves_entries


def _replace(traced: Traced, attention: fx.Node, value: Layer, output: Layer) -> fx.Node | None:
    graph, batch = traced.graph, traced.batch
    found, placed = _value_rows(attention, value, batch), _output_columns(attention, output, batch)
    if found is None or placed is None:
        return None
    (rows, rows_by_time), (columns, columns_by_time) = found, placed
    q, k, *settings = _scores(attention)
    with graph.inserting_before(output.node):
        new = graph.call_function(
            linear_after_attention,
            (
                output.x,
                output.weight,
                output.bias,
                output.flipped,
                columns.tolist(),
                columns_by_time,
                value.x,
                value.weight,
                value.bias,
                value.flipped,
                rows.tolist(),
                rows_by_time,
                q,
                k,
                *settings,
            ),
        )
    new.meta = dict(output.node.meta)
    output.node.replace_all_uses_with(new)
    graph.erase_node(output.node)
    return new


def _scores(attention: fx.Node) -> tuple[Any, ...]:
    """Queries, keys and settings of the fused op; the weights themselves, and no keys, where it is in pieces."""
    if attention.target != ATTENTION:
        return attention.args[0], None, None, False, None, False
    args: Any = (*attention.args, *(None, 0.0, False)[len(attention.args) - 3 :])
    q, k, _, mask, _, causal = args[:6]
    return q, k, mask, causal, attention.kwargs.get("scale"), attention.kwargs.get("enable_gqa", False)


def _value_rows(attention: fx.Node, value: Layer, batch: int) -> tuple[Tensor, bool] | None:
    """Which output of the value layer each entry of a head is: `[heads, d]`, and whether it has time before batch."""
    target = _values(attention)
    shape = _sizes(value.node)
    if target.meta["val"].dim() not in (3, 4):
        return None
    tokens = _sizes(target)[-2]
    feature = torch.arange(shape[-1]).expand(shape)
    position = torch.arange(batch * tokens).reshape(*shape[:-1], 1).expand(shape)
    rows, places = (_by_head(_moved(target, value.node, entries), batch) for entries in (feature, position))
    if not bool((rows == rows[:1, :, :1]).all() & (places == places[:, :1, :, :1]).all()):
        return None
    by_time = _order(places[:, 0, :, 0], batch, tokens)
    return None if by_time is None else (rows[0, :, 0], by_time)


def _by_head(values: Tensor, batch: int) -> Tensor:
    """`[B, heads, T, d]`, also from `[B * heads, T, d]`."""
    return values if values.dim() == 4 else values.reshape(batch, -1, *values.shape[1:])


def _order(places: Tensor, batch: int, tokens: int) -> bool | None:
    """Whether the row of token `t` of sample `b`, `places[b, t]`, is `t * batch + b`; False for `b * tokens + t`."""
    b, t = torch.arange(batch).reshape(-1, 1), torch.arange(tokens).reshape(1, -1)
    if bool((places == b * tokens + t).all()):
        return False
    return True if bool((places == t * batch + b).all()) else None


def _output_columns(attention: fx.Node, output: Layer, batch: int) -> tuple[Tensor, bool] | None:
    """Which entry (head times d) each input of the output layer is: `[in]`, and whether it has time before batch."""
    shape = _sizes(attention)
    _, heads, tokens, d = _by_head(torch.empty(shape), batch).shape
    feature = torch.arange(heads * d).reshape(1, heads, 1, d).expand(batch, heads, tokens, d)
    position = torch.arange(batch * tokens).reshape(batch, 1, tokens, 1).expand(batch, heads, tokens, d)
    columns, places = (_moved(output.x, attention, entries.reshape(shape)) for entries in (feature, position))
    columns, places = columns.reshape(-1, columns.shape[-1]), places.reshape(-1, columns.shape[-1])
    if places.shape[0] != batch * tokens or not bool((places == places[:, :1]).all() & (columns == columns[:1]).all()):
        return None
    at = torch.empty(batch * tokens, dtype=torch.long)
    at[places[:, 0]] = torch.arange(batch * tokens)  # the row that holds each (sample, token)
    by_time = _order(at.reshape(batch, tokens), batch, tokens)
    return None if by_time is None else (columns[0], by_time)


def _moved(node: fx.Node, source: fx.Node, entries: Tensor) -> Tensor:
    """`entries`, laid out as `source`, sent through the moves from there to `node`."""
    if node is source:
        return entries
    function, extras = cut(node, [source], _moves_between(node, source))
    sizes = [hint(e.meta["val"]) if not isinstance(e.meta["val"], Tensor) else None for e in extras]
    return function(entries, *sizes)


def _moves_between(node: fx.Node, source: fx.Node) -> set[fx.Node]:
    found = {source}
    current: Any = node
    while current is not source:
        found.add(current)
        current = current.args[0]
    return found


def _sizes(node: fx.Node) -> torch.Size:
    return torch.Size(hint(s) for s in node.meta["val"].shape)
