"""The streamlined network: what `streamline` returns and users call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from propagauss.checks import kind, tensor
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian, mean_of
from propagauss.inputs import Takes, as_call
from propagauss.network.code import read_directly
from propagauss.network.plan import Plan
from propagauss.network.unpickled import Unpickled
from propagauss.nodes import depends, hint, is_open
from propagauss.tracing.trace import Traced, flatten

WORKING_BYTES = 2**28  # for the joint covariances of the samples that are worked on together
COVARIANCES_ALIVE = 4  # of one size, at most, at one time


@dataclass(frozen=True)
class Slot:
    """One input of a network, as the example had it."""

    name: str
    literal: bool = False  # None or a number: built in, `value` says which
    value: Any = None
    uncertain: bool = False
    dtype: torch.dtype | None = None
    sizes: tuple[int | None, ...] = ()  # None where any size will do
    example: tuple[int, ...] = ()
    sparse: bool = False  # whether it may be

    def check(self, i: int, leaf: Any, word: str) -> None:
        """Refuse what the network was not made for; `word` says how it was made: streamlined, linearised."""
        if self.literal:
            if leaf != self.value:
                raise InputError(
                    f"input {i} was {self.value!r} when the network was {word} and is built in, "
                    f"but is {leaf!r} now: {word[:-1]} again with that value in the example"
                )
            return
        if self.uncertain and not isinstance(leaf, Gaussian):
            raise InputError(
                f"input {i} was a Gaussian when the network was {word}, but is a {type(leaf).__name__}: pass "
                f"pg.Gaussian(x, variance=...), or {word[:-1]} again with a plain example"
            )
        if not self.uncertain and not isinstance(leaf, Tensor):
            raise InputError(
                f"input {i} was a plain tensor when the network was {word}, but is {kind(leaf)}: "
                f"pass a tensor (torch.as_tensor makes one), or {word[:-1]} again with a Gaussian as the example"
            )
        if not torch.compiler.is_compiling():
            tensor(mean_of(leaf), f"input {i}", sparse=self.sparse)
        if leaf.dtype != self.dtype:
            raise InputError(
                f"input {i} is {leaf.dtype}; the network was {word} for {self.dtype}: convert it with .to()"
            )
        fits = len(leaf.shape) == len(self.sizes) and all(
            n is None or n == m for n, m in zip(self.sizes, leaf.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if n is None else str(n) for n in self.sizes)
            raise InputError(
                f"input {i} has shape {tuple(leaf.shape)}; the network takes [{wanted}], as the model or the example "
                f"fixes it: {word[:-1]} again with an example of this shape"
            )


class Streamlined(Unpickled, nn.Module):
    """A streamlined network: `net(x)` is the `Gaussian` at the model's output.

    Every floating-point output of the model becomes a Gaussian (of zero variance where nothing random reaches it), in
    the structure the model returns. `net.plan` says what happens at each op, `net.code` is the generated forward, and
    `net.settings` are the options it was made with: `streamline(model, posterior, example, **net.settings)`.
    `net.noise` is the standard deviation of the observations that its posterior was fitted with, None if there is none.
    """

    word = "streamlined"

    def __init__(self, body: fx.GraphModule, plan: Plan, traced: Traced):
        super().__init__()
        read_directly(body)
        self.body = body
        self.plan = plan
        self.settings: dict[str, Any] = {}
        self.noise: float | None = None
        self._in_spec = traced.in_spec
        self._out_spec = traced.out_spec
        self.slots = _slots(traced)
        self._single = len(self.slots) == 1 and self._in_spec == flatten((torch.zeros(1),), {})[1]
        self._single_output = traced.out_spec.is_leaf()
        self._is_divisible = _is_divisible(self.slots, traced)
        self._at_once = _samples_at_once(plan) if self._is_divisible else None

    @property
    def code(self) -> str:
        return self.body.code

    @property
    def graph(self) -> fx.Graph:
        return self.body.graph

    @property
    def at_once(self) -> int | None:
        """How many samples an exported program of this network should work on together; None for all."""
        return self._at_once

    @property
    def form(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of a call, with the number of its slot in the place of each input."""
        return pytree.tree_unflatten(range(len(self.slots)), self._in_spec)

    @property
    def takes(self) -> Takes:
        """The inputs that a loader has to yield."""
        args, kwargs = self.form
        return Takes(_form(self._in_spec), "the network", frozenset(kwargs), len(args), further=False, exact=True)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()`, `.double()` and the like also change which inputs are accepted."""
        self.slots = [replace(s, dtype=s.dtype and fn(torch.empty(0, dtype=s.dtype)).dtype) for s in self.slots]
        return super()._apply(fn, recurse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._single and len(args) == 1 and not kwargs and isinstance(args[0], (Tensor, Gaussian)):
            leaves: list[Any] = [args[0]]
            self.slots[0].check(0, args[0], self.word)
        else:
            leaves = self._flatten(args, kwargs)
        return self.from_leaves(leaves)

    def from_leaves(self, leaves: list[Any]) -> Any:
        """The output for the tensors and Gaussians of a call in the order of `slots`, without its literals."""
        outputs = self.outputs(leaves)
        return outputs[0] if self._single_output else pytree.tree_unflatten(outputs, self._out_spec)

    def outputs(self, leaves: list[Any]) -> tuple[Any, ...]:
        """All outputs in a row, whatever structure the model returns them in."""
        if self._is_divisible and not torch.compiler.is_compiling() and leaves[0].shape[0] == 0:
            return self._of_nothing(leaves)
        return self._whole(leaves) if self._at_once is None else self._in_chunks(leaves, self._at_once)

    def _of_nothing(self, leaves: list[Any]) -> tuple[Any, ...]:
        """No rows, of the right shape: those of one sample are dropped, since models may not know a size of none."""
        one = [pytree.tree_map(lambda t: t.new_zeros((1, *t.shape[1:])), leaf) for leaf in leaves]
        return tuple(rows_of(output, slice(0)) for output in self._whole(one))

    def _whole(self, leaves: list[Any]) -> tuple[Any, ...]:
        return self.body.forward(*leaves)

    def _in_chunks(self, leaves: list[Any], size: int) -> tuple[Any, ...]:
        """A few samples at a time, since joint covariances are large; samples do not depend on each other."""
        batch = leaves[0].shape[0]
        if torch.compiler.is_compiling() or batch <= size or any(leaf.shape[0] != batch for leaf in leaves):
            return self._whole(leaves)
        starts = range(0, batch, size)
        found = [self._whole([rows_of(leaf, slice(start, start + size)) for leaf in leaves]) for start in starts]
        return tuple(_joined(parts) for parts in zip(*found, strict=True))

    def leaves(self, example: Any) -> list[Any]:
        """The tensors and Gaussians of a call, as `from_leaves` takes them."""
        return self._flatten(*as_call(example))

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = flatten(args, kwargs)
        if spec != self._in_spec and len(args) == 1 and not kwargs:
            leaves, spec = flatten(*as_call(args[0]))
        if spec != self._in_spec:
            raise InputError(
                f"this network was {self.word} for {_form(self._in_spec)}, but was called with {_form(spec)}: call it "
                "as the model was called on the example"
            )
        for i, (slot, leaf) in enumerate(zip(self.slots, leaves, strict=True)):
            slot.check(i, leaf, self.word)
        return [leaf for slot, leaf in zip(self.slots, leaves, strict=True) if not slot.literal]

    def __repr__(self) -> str:
        return f"Streamlined({len(self.plan)} rewritten ops, {len(self.plan.parameters)} random parameters)"


def _form(spec: pytree.TreeSpec) -> str:
    """How a call was made: `2 positional inputs and mask=`."""
    args, kwargs = pytree.tree_unflatten(["*"] * spec.num_leaves, spec)
    parts = [f"{len(args)} positional input{'s' * (len(args) > 1)}"] if args else []
    if any(a != "*" for a in args):
        parts = [f"positional inputs nested as {args}".replace("'", "")]
    return " and ".join([*parts, *(f"{name}=" for name in kwargs)]) or "no inputs"


def _samples_at_once(plan: Plan) -> int | None:
    """How many samples may be in memory together, given their joint covariances; None if these are none."""
    largest = max((step.entries for step in plan if step.structure == "full"), default=0)
    return max(1, WORKING_BYTES // (COVARIANCES_ALIVE * 4 * largest**2)) if largest else None


def _is_divisible(slots: list[Slot], traced: Traced) -> bool:
    """Whether a batch comes in first dimensions, and leaves in first dimensions."""
    tensors = [slot for slot in slots if not slot.literal]
    inputs = bool(tensors) and all(slot.sizes and slot.sizes[0] is None for slot in tensors)
    return inputs and all(_has_batch_first(output, traced.batch_symbols) for output in traced.outputs)


def _has_batch_first(output: Any, symbols: set[Any]) -> bool:
    shape = output.meta["val"].shape if isinstance(output, fx.Node) else ()
    return len(shape) > 0 and depends(shape[0], symbols)


def rows_of(leaf: Any, which: slice) -> Any:
    """Some samples of a tensor, or of all that a Gaussian stores."""
    return pytree.tree_map(lambda t: t[which], leaf)


def _joined(parts: tuple[Any, ...]) -> Any:
    """The results of all chunks as one."""
    return pytree.tree_map(lambda *tensors: torch.cat(tensors), *parts)


def _slots(traced: Traced) -> list[Slot]:
    example = pytree.tree_unflatten(traced.example, traced.in_spec)
    names = ["_".join(str(_key(k)) for k in path[1:]) for path, _ in pytree.tree_leaves_with_path(example)]
    names = [f"x{name}" if name.isdigit() else name for name in names]
    entries = zip(names, traced.inputs, traced.example, traced.uncertain_inputs, strict=True)
    return [_slot(name, node, value, uncertain) for name, node, value, uncertain in entries]


def _key(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))


def _slot(name: str, node: fx.Node | None, value: Any, uncertain: bool) -> Slot:
    if node is None or not isinstance(value, Tensor):
        return Slot(name, literal=True, value=value)
    sizes = tuple(None if is_open(s) else hint(s) for s in node.meta["val"].shape)
    return Slot(
        name,
        uncertain=uncertain,
        dtype=value.dtype,
        sizes=sizes,
        example=tuple(value.shape),
        sparse=value.layout != torch.strided,
    )
