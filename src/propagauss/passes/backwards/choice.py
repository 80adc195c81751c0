"""Some outputs only: which ones, and how the backward walk starts from them.

At each position of the output `[B, ..., C]` (all dimensions but the last) `k` entries are chosen, by their size or by
their index. The walk then has `K = positions * k` rows for each sample instead of one for every entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from propagauss.checks import kind
from propagauss.errors import InputError
from propagauss.nodes import hint, is_float
from propagauss.rules.adjoints.forms import Form, Independent, added
from propagauss.tracing.trace import Traced


@dataclass(frozen=True)
class Choice:
    """`k` entries of the last dimension: these, or the largest if there are none."""

    k: int
    width: int  # of the last dimension
    these: tuple[int, ...] | None = None

    @property
    def note(self) -> str:
        """For the plan."""
        which = f"the {self.k} largest of" if self.these is None else f"numbers {', '.join(map(str, self.these))} of"
        return (
            f"outputs: {which} {self.width:,} along the last dimension, at each position; all others report variance 0"
        )


def checked(outputs: Any) -> int | tuple[int, ...] | None:
    """What a user gave, as a count or indices; an error if it is neither. Sizes are not known yet."""
    if outputs is None:
        return None
    if _is_count(outputs):
        if outputs < 1:
            raise InputError(f"outputs is {outputs}; it must be at least 1, or None for all of them")
        return int(outputs)
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise InputError(
            f"outputs is {kind(outputs)}; it must be a number (so many of the largest), a list of indices, or None for "
            "all"
        )
    if not len(outputs):
        raise InputError("outputs is an empty list: name at least one index, or leave it None for all of them")
    bad = next((i for i in outputs if not _is_count(i)), None)
    if bad is not None:
        raise InputError(f"outputs holds {kind(bad)}; indices of outputs must be whole numbers")
    low = min(outputs)
    if low < 0:
        raise InputError(f"outputs holds {low}; indices count from 0, and negative ones are not taken")
    if len(set(outputs)) < len(outputs):
        raise InputError(f"outputs is {list(outputs)}; every index may stand in it once")
    return tuple(int(i) for i in outputs)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def choose(outputs: int | tuple[int, ...] | None, traced: Traced) -> Choice | None:
    """What `outputs` means for this model; None for all of its outputs."""
    if outputs is None:
        return None
    found = [o for o in traced.outputs if isinstance(o, fx.Node) and is_float(o)]
    if len(found) != 1:
        raise InputError(
            f"outputs= chooses among the entries of one output, and the model returns {len(found)} floating-point "
            "tensors: name one with output=, or let the model return only one"
        )
    shape = [hint(s) for s in found[0].meta["val"].shape]
    width = shape[-1] if len(shape) > 1 else 1
    if isinstance(outputs, int):
        return None if outputs >= width else Choice(outputs, width)
    if max(outputs) >= width:
        raise InputError(
            f"outputs holds {max(outputs)}, but the last dimension of the output has indices from 0 to {width - 1}"
        )
    return None if len(outputs) == width else Choice(len(outputs), width, outputs)


class Seeds:
    """Nodes of the graph at which the walk from chosen outputs starts.

    `start [K, B, ...]` are rows of the identity, another choice of them for each sample. A linear layer at the end of
    the model needs rows of its weight instead, so that nothing of the size of a vocabulary is made.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, choice: Choice, mean: fx.Node, event: list[int], i: int):
        self.graph, self.event, self.mean = graph, event, mean
        self.rows = math.prod(event) // choice.width * choice.k
        if choice.these is None:
            self.index = graph.call_function(largest, (mean, choice.k))
        else:
            root.register_buffer(f"chosen_{i}", torch.tensor(choice.these))
            self.index = graph.call_function(everywhere, (mean, graph.get_attr(f"chosen_{i}")))
        root.register_buffer(f"whole_{i}", torch.arange(self.rows))
        self.numbers = graph.get_attr(f"whole_{i}")

    def begin(self, wanted: fx.Node) -> fx.Node:
        """`wanted` are the numbers of some rows, or None for all of them."""
        self.numbers = self.graph.call_function(either, (wanted, self.numbers))
        self.classes = self.graph.call_function(classes_of, (wanted, self.index))
        self.start = self.graph.call_function(seed_of, (self.numbers, self.classes, self.index, self.mean, self.event))
        return self.start

    @property
    def rows_taken(self) -> tuple[fx.Node, ...]:
        """What tells the rows of a last layer that were chosen."""
        return self.numbers, self.classes, self.index

    def through(self, weight: fx.Node) -> fx.Node:
        """The sensitivities behind a linear layer at the end."""
        return self.graph.call_function(rows_of, (self.numbers, self.classes, self.index, weight, self.event))


class ChosenRows(Form):
    """What independent weights of a last layer, with variances `V [C, D]`, add to the covariance of chosen outputs.

    Entries `c` at position `t` and `d` at position `s` have `Σ_i V_ci x_ti x_si` in common if `c = d`, else nothing.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: Independent, full: bool):
        super().__init__()
        self.full = full
        self.register_buffer("weight", layer.weight.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.clone())

    def forward(
        self, numbers: Tensor, classes: Tensor, index: Tensor, x: Tensor, total: Tensor | None = None
    ) -> Tensor:
        classes = classes.mT  # [B, K]
        positions = numbers // index.shape[-1]
        a = x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2).index_select(1, positions)  # [B, K, D]
        moved = a * F.embedding(classes, self.weight)
        own = x.new_zeros(()) if self.bias is None else self.bias[classes]
        if not self.full or x.dim() == 2:  # at one position, no entry is chosen twice
            found = (moved * a).sum(-1) + own
            return added(torch.diag_embed(found) if self.full else found, total)
        same = classes.unsqueeze(-1) == classes.unsqueeze(-2)
        return added((moved @ a.mT + own.unsqueeze(-1)) * same.to(x.dtype), total)


# -- what runs


def largest(y: Tensor, k: int) -> Tensor:
    """`[B, ..., C] -> [B, ..., k]`"""
    return y.topk(k, -1).indices


def everywhere(y: Tensor, these: Tensor) -> Tensor:
    """The same indices at every position of every sample."""
    return these.expand(*y.shape[:-1], -1)


def either(wanted: Tensor | None, all_rows: Tensor) -> Tensor:
    return all_rows if wanted is None else wanted


def classes_of(wanted: Tensor | None, index: Tensor) -> Tensor:
    """The entry of the last dimension that each row is about, for every sample: `[K, B]`."""
    flat = index.flatten(1)
    return (flat if wanted is None else flat.index_select(1, wanted)).mT


def seed_of(numbers: Tensor, classes: Tensor, index: Tensor, y: Tensor, event: list[int]) -> Tensor:
    """1 at the entry that a row is about, else 0: `[K, B, *event]`."""
    entries = classes + (numbers // index.shape[-1] * event[-1]).unsqueeze(1)
    zeros = y.new_zeros(numbers.shape[0], index.shape[0], math.prod(event))
    ones = y.new_ones(()).expand(*classes.shape, 1)
    return zeros.scatter(-1, entries.unsqueeze(-1), ones).reshape(numbers.shape[0], index.shape[0], *event)


def rows_of(numbers: Tensor, classes: Tensor, index: Tensor, w: Tensor, event: list[int]) -> Tensor:
    """The same pulled back through `y = x Wᵀ + b`: the row of the weight at the position that a row is about."""
    found = F.embedding(classes, w)  # [K, B, D]
    positions = math.prod(event[:-1])
    if len(event) == 1:
        return found
    at = (numbers // index.shape[-1]).unsqueeze(1) == torch.arange(positions, device=numbers.device)
    placed = at.to(w.dtype).unsqueeze(1).unsqueeze(-1) * found.unsqueeze(2)  # [K, B, positions, D]
    return placed.reshape(*found.shape[:2], *event[:-1], found.shape[-1])
