"""Which rule belongs to which op, and what a rule may ask about the place where it is used.

There are two ways to write one. A *function rule* (`@rule(op)`) is called at run time with the op's own arguments, in
which the uncertain tensors are `Gaussian`s; it must not keep state. A *builder* (`@builder(op)`) is called once, when
the model is streamlined, with a `Site`; it precomputes what it can and returns an `nn.Module` to be called at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from propagauss.checks import kind
from propagauss.errors import PropagaussError
from propagauss.posteriors.base import Posterior
from propagauss.rules.facts import Op, OpTable, facts, state


@dataclass(frozen=True)
class Options:
    """What the caller of `streamline` chose."""

    covariance: str = "diagonal"
    activation: str = "linearise"
    attention: str = "variance"
    normalisation: str = "scale"

    @property
    def full(self) -> bool:
        return self.covariance == "full"


@dataclass(frozen=True)
class FunctionRule:
    """A rule that is a plain function of the op's arguments."""

    function: Callable[..., Any]
    note: str


@dataclass(frozen=True)
class Weight:
    """A weight matrix that is known when the model is streamlined."""

    tensor: Tensor  # as the op uses it
    name: str | None  # its parameter, if that is random
    transposed: bool  # the op uses the transpose of the stored parameter


@dataclass(frozen=True)
class Built:
    """What to call at run time, and a word for the plan.

    `target` is a pure function or a module. `inputs` may hold nodes of the source graph, literals, and tensors, which
    become buffers of the network. A function with its constants as inputs costs less per call than a module.
    """

    target: nn.Module | Callable[..., Any]
    inputs: tuple[Any, ...]
    note: str


class Site(Protocol):
    """One op of the graph, with at least one uncertain argument, as a builder sees it."""

    @property
    def op(self) -> Op: ...

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> dict[str, Any]: ...

    @property
    def options(self) -> Options: ...

    @property
    def posterior(self) -> Posterior | None: ...

    @property
    def wanted_outputs(self) -> tuple[int, int] | None:
        """The only part of the last dimension whose variance is used, if not all."""
        ...

    def is_random(self, arg: Any) -> bool:
        """Whether an argument (a node, a literal or a list of them) is uncertain at run time."""
        ...

    def is_parameter(self, arg: Any) -> bool:
        """Whether an uncertain argument is made of parameters alone, the same for all samples."""
        ...

    def constant(self, arg: Any) -> Tensor | None:
        """The value of an argument that depends neither on the inputs nor on a random parameter."""
        ...

    def weight(self, arg: Any) -> Weight | None:
        """The argument as a (possibly random) stored matrix, if that is what it is."""
        ...

    def shape(self, arg: Any) -> torch.Size:
        """Sizes of an argument in the traced example."""
        ...

    def positions(self, arg: Any) -> int:
        """How many vectors along the last dimension one sample has: 5 for `[batch, 5, features]`."""
        ...


Builder = Callable[[Site], "Built | None"]


FUNCTIONS: dict[Op, FunctionRule] = OpTable()
BUILDERS: dict[Op, list[Builder]] = OpTable()


def fixed_positions(node: fx.Node) -> tuple[int, ...]:
    """Positions of the arguments that the op of a node takes at their means."""
    return facts(node.target).at_mean


def arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that an op reads, without those it takes at their means; each once, in order."""
    fixed = fixed_positions(node)
    found: dict[fx.Node, None] = {}
    map_arg(([a for i, a in enumerate(node.args) if i not in fixed], node.kwargs), lambda n: found.setdefault(n))
    return list(found)


def map_arguments(node: fx.Node, value: Callable[[fx.Node], Any], mean: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    """Arguments of an op with its nodes replaced: by `mean` where it takes them at their means, else by `value`."""
    fixed = fixed_positions(node)
    args = tuple(map_arg(a, mean if i in fixed else value) for i, a in enumerate(node.args))
    return args, map_arg(node.kwargs, value)


def rule(*ops: Op, note: str = "", **known: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of one or more ops: the public way to extend propagauss.

    The function gets the op's own arguments, with a `Gaussian` wherever a tensor is uncertain, and returns a `Gaussian`
    (or a tuple of them for an op with several results). At least one argument is a Gaussian; others may be plain.

    Args:
        ops: such as `torch.ops.aten.softsign.default` or `torch.ops.mylib.swiglu.default`; or the name
            `"mylib::swiglu"`, if `mylib` may be imported later.
        note: what is approximated, for the plan.
        known: facts about the ops, such as `at_mean=(1,)` if only the mean of their second argument counts; all of
            them are listed at `propagauss.rules.facts.Facts`.
    """

    _check_ops(ops)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise PropagaussError(f"a rule is a function of the op's arguments, not {kind(function)}")
        for op in ops:
            FUNCTIONS[op] = FunctionRule(function, note)
        state(*ops, **known)
        if function.__module__ is None:  # made by exec; generated code needs a name for it
            function.__module__ = "__main__"
        return function

    return register


def _check_ops(ops: tuple[Any, ...]) -> None:
    """Refuse what is not an op, which no graph would ever hold."""
    example = "torch.ops.aten.softsign.default"
    if not ops:
        raise PropagaussError(f"rule() names no op: write @pg.rule({example})")
    for op in ops:
        if isinstance(op, torch._ops.OpOverloadPacket):
            raise PropagaussError(
                f"rule() takes one overload of an op, such as {op}.{op.overloads()[0]}, not the whole {op}"
            )
        named = isinstance(op, str) and "::" in op
        if not (named or isinstance(op, torch._ops.OpOverload) or getattr(op, "__module__", "") == "_operator"):
            raise PropagaussError(
                f"rule() takes ops as they stand in a graph, such as {example}, or names such as 'mylib::swiglu'; "
                f"got {kind(op)}"
            )


def builder(*ops: Op, **known: Any) -> Callable[[Builder], Builder]:
    """Register a builder; it may return None to leave the site to the builder before it or to a function rule.

    `known` are facts about the ops, as in `rule`.
    """

    def register(function: Builder) -> Builder:
        for op in ops:
            BUILDERS.setdefault(op, []).append(function)
        state(*ops, **known)
        return function

    return register


def is_node(arg: Any) -> bool:
    return isinstance(arg, fx.Node)


class Signature:
    """The names and defaults of an op's arguments, read once, so that rules can be compiled."""

    def __init__(self, op: Op):
        arguments = op._schema.arguments
        self.op = op
        self.names = tuple(a.name for a in arguments)
        self.positional = tuple(a.name for a in arguments if not a.kwarg_only)
        self.keywords = tuple(a.name for a in arguments if a.kwarg_only)
        self.defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, defaults included."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def call(self, arguments: dict[str, Any]) -> Any:
        """The op on arguments by name."""
        settings = {name: arguments[name] for name in self.keywords}
        return self.op(*[arguments[name] for name in self.positional], **settings)


def named(site: Site) -> dict[str, Any]:
    """The arguments of the op at a site by name."""
    return Signature(site.op).named(site.args, site.kwargs)
