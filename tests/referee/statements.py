"""What the library says of its diagonal mode beyond one sentence, as lists of ops and one formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

aten = torch.ops.aten

FORGOTTEN = {  # elementwise, but not tagged so by PyTorch
    aten.hardswish.default,
    aten.log_sigmoid.default,
    aten.rrelu.default,
    aten.selu.default,
    aten.celu.default,
    aten.special_ndtr.default,
}
IDENTITIES = {
    *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.contiguous.default),
    *(aten.feature_alpha_dropout.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default),
    *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.view.default),
    *(aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.type_as.default, aten.copy.default),
}
LAYERS = {  # ops that read the weight and bias of a layer together
    *(aten.linear.default, aten.batch_norm.default),
    *(getattr(aten, f"conv{n}d").default for n in (1, 2, 3)),
    *(getattr(aten, f"conv_transpose{n}").default for n in ("1d",)),
    *(getattr(aten, f"conv_transpose{n}").input for n in ("2d", "3d")),
}
RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}


def _lstm_cell(x: Tensor, state: list[Tensor], w: Tensor, u: Tensor, b: Any = None, d: Any = None) -> Any:
    """`c' = σ(f) c + σ(i) tanh(g)`, `h' = σ(o) tanh(c')`"""
    i, f, g, o = (F.linear(x, w, b) + F.linear(state[0], u, d)).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Any = None, d: Any = None) -> Tensor:
    """`h' = (1 - z) tanh(n + r n_h) + z h`"""
    (r, z, n), (hr, hz, hn) = F.linear(x, w, b).chunk(3, -1), F.linear(h, u, d).chunk(3, -1)
    z, n = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
    return (1 - z) * n + z * h


CELLS = {aten.lstm_cell.default: _lstm_cell, aten.gru_cell.default: _gru_cell}  # single steps, and what they are

TRANSPOSES = {aten.t.default, aten.numpy_T.default, aten.mT.default, aten.transpose.int, aten.permute.default}
DIFFERENTIABLE = {aten.copy.default: lambda old, new, *_: new.expand_as(old).to(old.dtype)}  # what has no derivative
NORMS = {aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default, aten.instance_norm.default}

_PER_CHANNEL = {aten.group_norm.default, aten.instance_norm.default}
_AFFINE_AT = {  # where the weight and the bias are among the arguments
    aten.layer_norm.default: (2, 3),
    aten.rms_norm.default: (2, None),
    aten.group_norm.default: (2, 3),
    aten.instance_norm.default: (1, 2),
}
_EPSILON = {  # where it is, and what it is by default
    aten.layer_norm.default: (4, 1e-5),
    aten.rms_norm.default: (3, torch.finfo(torch.float64).eps),
    aten.group_norm.default: (4, 1e-5),
    aten.instance_norm.default: (7, 1e-5),
}


def _argument(node: fx.Node, at: int | None) -> Any:
    return node.args[at] if at is not None and len(node.args) > at else None


def is_layer(node: fx.Node, parameter: fx.Node) -> bool:
    """Whether the op is a layer with this weight or bias: they may then depend on each other."""
    if node.target in (aten.matmul.default, aten.mm.default):
        return node.args[1] is parameter and parameter.meta["val"].dim() == 2
    return node.target in LAYERS or (node.target == aten.addmm.default and not node.kwargs)


def is_elementwise(target: Any) -> bool:
    """As PyTorch tags it, or one of those that it forgot, or an op that returns its input as it is."""
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return tagged or target in FORGOTTEN or target in IDENTITIES


def is_row_norm(node: fx.Node) -> bool:
    """Whether the op normalises by statistics of its own input, rather than by stored ones."""
    return node.target in NORMS and (node.target != aten.instance_norm.default or bool(node.args[5]))


def normalised(
    node: fx.Node,
    mean: Mapping[Any, Any],
    variance: Mapping[Any, Any],
    places: Mapping[Any, Tensor],
    covariance: Tensor,
) -> Tensor:
    """`Var[w u + b] = (w / σ)² v + u² V_w + V_b + 2 u C_wb`, `u = (x - μ) / σ` with `μ`, `σ` those of the mean."""
    x: Any = node.args[0]
    weight, bias = (_argument(node, i) for i in _AFFINE_AT[node.target])
    unit, gain = _unit_and_gain(node, mean[x])
    lift = (-1, *[1] * (unit.dim() - 2)) if node.target in _PER_CHANNEL else None

    def shaped(t: Tensor) -> Tensor:
        return t if lift is None else t.reshape(lift)

    w = shaped(mean[weight]) if weight is not None else 1.0
    total = torch.zeros_like(unit)
    if x in variance:
        total = total + variance[x] * (gain * w).square()
    if weight in variance:
        total = total + unit.square() * shaped(variance[weight])
    if bias in variance:
        total = total + shaped(variance[bias])
    if weight in places and bias in places:
        total = total + 2 * unit * shaped(covariance[places[weight], places[bias]])
    return total


def _unit_and_gain(node: fx.Node, x: Tensor) -> tuple[Tensor, Tensor]:
    """`(x - μ) / σ` and `1 / σ`."""
    args: Any = node.args
    rows, dims = x, (-1,)
    if node.target in _PER_CHANNEL:
        rows = x.reshape(x.shape[0], args[1] if node.target == aten.group_norm.default else x.shape[1], -1)
    else:
        dims = tuple(range(-len(args[1]), 0))
    centred = rows if node.target == aten.rms_norm.default else rows - rows.mean(dims, keepdim=True)
    at, default = _EPSILON[node.target]
    eps = _argument(node, at)
    gain = (centred.square().mean(dims, keepdim=True) + (default if eps is None else eps)).rsqrt()
    return (centred * gain).reshape(x.shape), gain.expand_as(rows).reshape(x.shape)
