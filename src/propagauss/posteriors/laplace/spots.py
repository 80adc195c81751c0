"""Parameters that are added, multiplied entry by entry or looked up: scales and shifts of norms, embeddings.

For these, as for linear maps, the gradient of a single sample follows from the one at the output of the op: it is that
gradient times a known factor, summed over the entries that share the parameter. A reader says how, for one call of a
torch function; an op that has none is left to per-sample loops.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Gradient = Callable[[Tensor, slice], Tensor]  # g [b, ...] at the output for some samples, and which -> [b, *shape]


@dataclass
class Spot:
    """One use of a chosen parameter; `probe` is a zero that was added to the output, of which `output` is a copy.

    An output that all samples share has a first dimension of 1, and a probe for each of them.
    """

    name: str
    gradient: Gradient
    output: Tensor
    probe: Tensor
    squares: Callable[[Tensor], Tensor] | None = None  # g -> Σ_b r_b², where that needs no gradient of each sample

    @property
    def shared(self) -> bool:
        return self.output.shape[:1] != self.probe.shape[:1]

    def sum_of_squares(self, g: Tensor) -> Tensor:
        """Over the samples."""
        return self.squares(g) if self.squares else self.gradient(g, slice(None)).square().sum(0)


@dataclass
class Reading:
    """How the gradient of one parameter follows from that at the output."""

    parameter: Tensor
    gradient: Gradient
    squares: Callable[[Tensor], Tensor] | None = None


# -- readers: the parameters of a call, each with its gradient; none if it is not a call that can be read


def _layer_norm(input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    plain = F.layer_norm(input.detach(), normalized_shape, eps=eps)
    return _scale_and_shift(plain, weight, bias)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _scale_and_shift(F.rms_norm(input.detach(), normalized_shape, eps=eps), weight, None)


def _group_norm(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return _scale_and_shift(F.group_norm(input.detach(), num_groups, eps=eps), weight, bias, channels=True)


def _batch_norm(
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training:
        return []
    plain = F.batch_norm(input.detach(), running_mean, running_var, eps=eps)
    return _scale_and_shift(plain, weight, bias, channels=True)


def _scale_and_shift(plain: Tensor, weight: Any, bias: Any, channels: bool = False) -> list[Reading]:
    """Of `plain * weight + bias`; the parameters belong to the channels in dimension 1, or to the last dimensions."""
    form = (1, -1, *[1] * (plain.dim() - 2)) if channels else None
    return [
        Reading(p, _summed(p, plain.shape, factor, form))
        for p, factor in ((weight, plain), (bias, None))
        if isinstance(p, Tensor)
    ]


def _times(left: Any, right: Any) -> list[Reading | None]:
    shape = _common(left, right)
    return [_entrywise(left, shape, right), _entrywise(right, shape, left)]


def _plus(left: Any, right: Any, *, alpha: float = 1) -> list[Reading | None]:
    shape = _common(left, right)
    return [_entrywise(left, shape, None), _entrywise(right, shape, None)] if alpha == 1 else []


def _expand(input: Tensor, *sizes: Any) -> list[Reading | None]:
    return [_entrywise(input, input.detach().expand(*sizes).shape, None)]


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> list[Reading]:
    if max_norm is not None or input.dim() < 2:
        return []
    ids, padding = input.flatten(1), None if padding_idx is None else padding_idx % weight.shape[0]

    def placed(g: Tensor, which: slice) -> tuple[Tensor, Tensor]:
        """`[b, T, D]` and `[b, T]`; positions, say, are the same for all samples."""
        each = ids[which] if len(ids) > 1 else ids.expand(len(g), -1)
        g = g.reshape(*each.shape, -1)
        return (g if padding is None else g * (each != padding).unsqueeze(-1)), each

    def gradient(g: Tensor, which: slice) -> Tensor:
        g, each = placed(g, which)
        return g.new_zeros(len(g), *weight.shape).scatter_add_(1, each.unsqueeze(-1).expand_as(g), g)

    def squares(g: Tensor) -> Tensor:
        g, each = placed(g, slice(None))
        same = (each.unsqueeze(2) == each.unsqueeze(1)).to(g)  # [B, T, T]
        total = (same @ g).square() / same.sum(2, keepdim=True)  # a word that occurs n times is there n times
        return g.new_zeros(weight.shape).index_add_(0, each.flatten(), total.flatten(0, 1))

    return [Reading(weight, gradient, squares)]


# -- shared


def _entrywise(p: Any, shape: torch.Size, factor: Any) -> Reading | None:
    """Of an op on entries, whose output has this shape; None if the parameter has an entry for each sample."""
    if not isinstance(p, Tensor):
        return None
    aligned = (*[1] * (len(shape) - p.dim()), *p.shape)
    return Reading(p, _summed(p, shape, factor)) if len(shape) and aligned[0] == 1 else None


def _summed(p: Tensor, shape: torch.Size, factor: Any, form: tuple[int, ...] | None = None) -> Gradient:
    """`g` times the factor, summed over all entries of a sample that share an entry of `p`.

    `form` is the shape in which `p` meets the output, by default aligned with its last dimensions.
    """
    aligned = (*[1] * (len(shape) - p.dim()), *p.shape) if form is None else form
    over = [i for i in range(1, len(shape)) if aligned[i] == 1 and shape[i] != 1]
    factor = factor.detach().expand(shape) if isinstance(factor, Tensor) else factor

    def gradient(g: Tensor, which: slice) -> Tensor:
        if factor is not None:
            g = g * (factor[which] if isinstance(factor, Tensor) else factor)
        return (g.sum(over) if over else g).reshape(len(g), *p.shape)

    return gradient


def _common(left: Any, right: Any) -> torch.Size:
    return torch.broadcast_shapes(*(t.shape for t in (left, right) if isinstance(t, Tensor)))


_READERS: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.embedding: _embedding,
    Tensor.expand: _expand,
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _times),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _plus),
}


def read(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Reading]:
    """The parameters of a call, or of other tensors in their place, whose gradients are known."""
    reader = _READERS.get(func)
    try:
        return [each for each in reader(*args, **kwargs) if each is not None] if reader else []
    except TypeError:  # a call in an unusual form
        return []


class Lookup(NamedTuple):
    """Of a call that looks up embeddings."""

    table: Tensor
    padding: int | None  # the row for padding: no gradient reaches it, so training leaves it
    keeps_norm: bool  # rows that are longer than `max_norm` are shortened in the table itself, whenever they are read


def lookup(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Lookup | None:
    if func not in (F.embedding, F.embedding_bag):
        return None
    call = inspect.signature(func).bind(*args, **kwargs).arguments
    row, table = call.get("padding_idx"), call["weight"]
    return Lookup(table, None if row is None else row % len(table), call.get("max_norm") is not None)
