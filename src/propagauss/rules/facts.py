"""What is known of an op, apart from what it does to a Gaussian: stated once, as a rule where its rule is registered.

    @rule(aten.flip.default, moves_entries=True)      # with a rule
    state(aten.gt.Tensor, compares=True)              # without one: see known_ops.py

A fact that nobody has stated is not known to hold, and whoever asks takes the general way. Formulas, such as the
derivatives of activations, are no facts in this sense; they stay with the maths that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS

from propagauss.errors import PropagaussError, nearest
from propagauss.nodes import is_custom

Op = Any  # torch._ops.OpOverload, its name "library::op", or a Python function such as operator.add


@dataclass(frozen=True)
class Facts:
    """What is known of one op; positions count its arguments from 0."""

    # which entries of the first argument the result has
    moves_entries: bool = False  # each entry of a result is one of the first argument, whatever type the numbers have
    keeps_order: bool = False  # the same entries in the same order of memory, in another shape
    casts: bool = False  # the same entries in another type
    returns_input: bool = False  # may be left out where shape and type stay the same
    splits: bool = False  # (x, how, dim=0): parts along a dimension
    joins: bool = False  # (parts, ...): entries of all parts beside one another
    reduces: bool = False  # (x, dim, keepdim=False): one entry for all along a dimension
    drops_out: bool = False  # (x, p, train): random in training only

    # what it computes
    elementwise: bool = False  # entry by entry; to be stated where PyTorch does not tag it so
    compares: bool = False  # true or false for pairs of entries
    combines: bool = False  # true or false for what is true or false
    linear_in: tuple[int, ...] = ()  # linear in each of these arguments, the others fixed; see also `linear_at`
    adds: int | None = None  # the argument that a result has added to it: the bias of a layer
    sums: bool = False  # affine in all of its arguments together, entry by entry
    no_gradient: bool = False  # a function of its argument, which PyTorch takes for a constant

    # what its rule does
    at_mean: tuple[int, ...] = ()  # arguments that are taken at their means: only shapes or types count, or it is flat
    broadcasts: bool = False  # the rule broadcasts an unbatched random parameter against samples itself
    reads_weight: bool = False  # the rule reads a stored weight

    # other ops, with the same arguments
    same_as: Op | None = None  # the op that this one is another name of
    stride_free: Op | None = None  # what to use where values do not have the strides that this op insists on
    in_pieces: Op | None = None  # what can be vectorised and differentiated, if the op itself cannot

    # what matters while a model is traced
    fresh: bool = False  # PyTorch composes it of others, but the result never shares memory with an argument
    training_flag: tuple[int, str] | None = None  # the argument that says whether it works as in training
    training_only: bool = False  # works as in training always

    def linear_at(self, position: int) -> bool:
        """Whether the op is linear in the argument at a position, the others fixed, without a constant part."""
        return position in self.linear_in or (self.moves_entries and position == 0)


class OpTable(dict[Op, Any]):
    """By op, or by its name `"library::op"` for an op of a package that may not be imported yet."""

    def get(self, op: Op, default: Any = None) -> Any:
        found = super().get(op)
        if found is None and isinstance(op, torch._ops.OpOverload):
            found = super().get(op.name())
        return default if found is None else found

    def __contains__(self, op: object) -> bool:
        return self.get(op) is not None


_NOTHING = Facts()
_NAMES = tuple(f.name for f in fields(Facts))
_FACTS: dict[Op, Facts] = OpTable()
# ops with one of these become parts of elementwise functions
_ENTRY_BY_ENTRY = ("elementwise", "keeps_order", "casts")


def facts(op: Op) -> Facts:
    """What is known of an op; of an unknown one, nothing."""
    return _FACTS.get(op, _NOTHING)


def state(*ops: Op, **known: Any) -> None:
    """Say what is known of ops, beside what was said of them before."""
    for name in known:
        if name not in _NAMES:
            raise PropagaussError(
                f"there is no fact about ops called '{name}'{nearest(name, _NAMES)} (there are {', '.join(_NAMES)})"
            )
    apart = [name for name in _ENTRY_BY_ENTRY if known.get(name)]
    for op in ops:
        if apart and _is_custom(op):
            raise PropagaussError(
                f"'{apart[0]}' cannot be stated of {op}, only of PyTorch's own ops: a function of one entry is "
                "differentiated forwards, which gives zero for custom ops; moves_entries and linear_in can be"
            )
        _FACTS[op] = replace(_FACTS.get(op, _NOTHING), **known)


def _is_custom(op: Op) -> bool:
    return is_custom(op) or (isinstance(op, str) and not op.startswith("aten::"))


def having(fact: str) -> set[Op]:
    """All ops of which a fact is known."""
    return {op for op, known in _FACTS.items() if getattr(known, fact) != getattr(_NOTHING, fact)}


def is_elementwise(op: Op) -> bool:
    """Whether an op works entry by entry: as PyTorch tags it, or as it is stated.

    A custom op never counts as such, whatever its tags: elementwise functions are differentiated forwards, and the
    forward derivative of a custom op is zero, without a word. Nor does an op without gradient.
    """
    if not isinstance(op, torch._ops.OpOverload) or is_custom(op) or facts(op).no_gradient:
        return False
    return torch.Tag.pointwise in op.tags or facts(op).elementwise


def is_differentiable(op: Op) -> bool:
    """Whether an op may have a derivative: one of PyTorch's own, or a custom one with a formula."""
    if not is_custom(op):
        return not facts(op).no_gradient
    defined = OPDEFS.get(op._schema.name)
    if defined is not None:
        return getattr(defined, "_backward_fn", None) is not None
    return op.has_kernel_for_dispatch_key(DispatchKey.Autograd) or op.has_kernel_for_dispatch_key(
        DispatchKey.CompositeImplicitAutograd
    )


def stride_free(op: Op) -> Op:
    """The op itself, or what to use in its place on values with other strides than the model's own."""
    return facts(op).stride_free or op


def differentiable(op: Op) -> Op:
    """The op itself, or what can be vectorised and differentiated in its place."""
    known = facts(op)
    return known.in_pieces or known.stride_free or op
