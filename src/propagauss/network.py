"""The streamlined network: what `streamline` returns and users call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.graph import hint, is_open
from propagauss.inputs import as_call
from propagauss.plan import Plan
from propagauss.trace import Traced, flatten


class Streamlined(nn.Module):
    """A streamlined network: `net(x)` is the `Gaussian` at the model's output.

    Every floating-point output of the model becomes a Gaussian (of zero variance where nothing random reaches it), in
    the structure the model returns. `net.plan` says what happens at each op, `net.code` is the generated forward.
    """

    def __init__(self, body: fx.GraphModule, plan: Plan, traced: Traced):
        super().__init__()
        self.body = body
        self.plan = plan
        self._in_spec = traced.in_spec
        self._out_spec = traced.out_spec
        self._used = [node is not None for node in traced.inputs]
        self._kinds = [
            ("Gaussian" if uncertain else "tensor", x.dtype) if isinstance(x, Tensor) else None
            for x, uncertain in zip(traced.example, traced.uncertain_inputs, strict=True)
        ]
        self._literals = [None if isinstance(x, Tensor) else x for x in traced.example]
        self._sizes = [_fixed_sizes(node) for node in traced.inputs]
        self._single = len(self._kinds) == 1 and self._in_spec == flatten((torch.zeros(1),), {})[1]
        self._single_output = traced.out_spec.is_leaf()

    @property
    def code(self) -> str:
        return self.body.code

    @property
    def graph(self) -> fx.Graph:
        return self.body.graph

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()`, `.double()` and the like also change which inputs are accepted."""
        self._kinds = [kind and (kind[0], fn(torch.empty(0, dtype=kind[1])).dtype) for kind in self._kinds]
        return super()._apply(fn, recurse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._single and len(args) == 1 and not kwargs:
            leaves: list[Any] = [args[0]]
            self._check(0, args[0])
        else:
            leaves = self._flatten(args, kwargs)
        outputs = self.body.forward(*leaves)
        return outputs[0] if self._single_output else pytree.tree_unflatten(outputs, self._out_spec)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = flatten(args, kwargs)
        if spec != self._in_spec and len(args) == 1 and not kwargs:
            leaves, spec = flatten(*as_call(args[0]))
        if spec != self._in_spec:
            raise InputError(f"this network was streamlined for inputs of the form {self._in_spec}, got {spec}")
        for i, leaf in enumerate(leaves):
            self._check(i, leaf)
        return [leaf for leaf, used in zip(leaves, self._used, strict=True) if used]

    def _check(self, i: int, leaf: Any) -> None:
        kind = self._kinds[i]
        if kind is None:
            if leaf != self._literals[i]:
                raise InputError(
                    f"input {i} was {self._literals[i]!r} when the network was streamlined and is built in, "
                    f"but is {leaf!r} now: streamline again with that value in the example"
                )
            return
        form, dtype = kind
        if form == "Gaussian" and not isinstance(leaf, Gaussian):
            raise InputError(
                f"input {i} was a Gaussian when the network was streamlined, but is a {type(leaf).__name__}: pass "
                "pg.Gaussian(x, variance=...), or streamline again with a plain example"
            )
        if form == "tensor" and not isinstance(leaf, Tensor):
            raise InputError(
                f"input {i} was a plain tensor when the network was streamlined, but is a {type(leaf).__name__}: "
                "pass a tensor, or streamline again with a Gaussian as the example"
            )
        if leaf.dtype != dtype:
            raise InputError(
                f"input {i} is {leaf.dtype}; the network was streamlined for {dtype}: convert it with .to()"
            )
        sizes = self._sizes[i]
        fits = len(leaf.shape) == len(sizes) and all(
            n is None or n == m for n, m in zip(sizes, leaf.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if n is None else str(n) for n in sizes)
            raise InputError(
                f"input {i} has shape {tuple(leaf.shape)}; the network takes [{wanted}], as the model or the example "
                "fixes it: streamline again with an example of this shape"
            )

    def __repr__(self) -> str:
        return f"Streamlined({len(self.plan)} rewritten ops, {len(self.plan.parameters)} random parameters)"


def _fixed_sizes(node: fx.Node | None) -> tuple[int | None, ...]:
    """The sizes that an input must have; None where any will do."""
    value = None if node is None else node.meta.get("val")
    if not isinstance(value, Tensor):
        return ()
    return tuple(None if is_open(s) else hint(s) for s in value.shape)
