"""The ways to rewrite one op on uncertain values: functions of a site that emit nodes, or return None.

They are tried in the order of `STRATEGIES`, and the first that answers wins. What has a rule of its own comes before
what is linearised by its Jacobian, and what is known to be one function of one value comes before both.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from propagauss.nodes import dtype_of, shape_of
from propagauss.passes.fusion import cut, is_elementwise, is_pointwise
from propagauss.passes.rewriting.new_graph import Moments
from propagauss.passes.rewriting.site import OpSite
from propagauss.passes.sample_mixing import keeps_apart
from propagauss.rules.derivatives.jacobian import Linearised, LinearisedVariances, Piece
from propagauss.rules.elementwise import activation
from propagauss.rules.elementwise.activation import CLOSED, MomentMatched
from propagauss.rules.facts import facts, is_differentiable
from propagauss.rules.registry import BUILDERS, FUNCTIONS, map_arguments
from propagauss.rules.wrapping import Delta, Pointwise

aten = torch.ops.aten


@dataclass(frozen=True)
class Emitted:
    """What now stands for an op, and the words for the plan; a `rule` of None leaves the op out of it."""

    value: fx.Node
    rule: str | None
    note: str
    moments: Moments | None = None  # if that is how it was done
    by_layer: bool = False  # by a rule that knows the parameters of its layer
    is_whole: bool = False  # one function of one value: its arguments have no covariances to be added


Strategy = Callable[[OpSite], Emitted | None]


def fused(site: OpSite) -> Emitted | None:
    """All arguments are functions of one value further back: the op and what lies between, as one function."""
    source, new, node = site.source, site.new, site.node
    if source is None or source in new.virtual:
        return None
    if source in site.random and site.occurrences == 1 and not site.reads_virtual:
        return None  # nothing lies between
    function, extras = cut(node, [source], new.random)
    ops = [n.target for n in function.graph.nodes if n.op == "call_function"]
    if not all(map(is_differentiable, ops)):
        return None
    pointwise = all(map(is_elementwise, ops))
    label = f"fused {'elementwise' if pointwise else 'function'} of {source.name}"
    if pointwise and shape_of(source) == shape_of(node):
        module = activation.elementwise(function, site.options.activation, dtype_of(node), graph=function)
        return _elementwise(site, module, source, extras, label, is_whole=True)
    value, note = _linearised(site, new.piece_from(node, [source], function), [source], extras)
    return Emitted(value, label, "exact" if note == "exact" else "linearised as a whole", is_whole=True)


def built(site: OpSite) -> Emitted | None:
    """A builder: it looks at the place of the op, and precomputes what it can."""
    if not fits(site) or _must_be_pointwise(site):
        return None
    for build in reversed(BUILDERS.get(site.op, [])):
        made = build(site)
        if made is not None:
            value = site.new.emit_built(site.node.name, made.target, made.inputs)
            label = type(made.target).__name__ if isinstance(made.target, nn.Module) else made.target.__name__
            return Emitted(value, label, made.note, by_layer=True)
    return None


def function_rule(site: OpSite) -> Emitted | None:
    """A rule that is a function of the op's own arguments."""
    found = FUNCTIONS.get(site.op)
    if found is None or not fits(site) or _must_be_pointwise(site) or _must_be_built(site):
        return None
    arguments = map_arguments(site.node, site.new.value, site.new.plain)
    value = site.new.graph.call_function(found.function, *arguments)
    name = None if site.op is operator.getitem else found.function.__name__
    return Emitted(value, name, found.note)


def closed_form(site: OpSite) -> Emitted | None:
    """An elementwise op of one value, linearised, whose derivative is written down."""
    found = CLOSED.get(site.op)
    if found is None or site.options.activation != "linearise" or not _is_of_one_value(site) or _at(site) != 0:
        return None
    value = site.new.graph.call_function(
        found, map_arg(site.node.args, site.new.value), map_arg(site.node.kwargs, site.new.value)
    )
    return Emitted(value, "elementwise", _activation_note(site))


def elementwise(site: OpSite) -> Emitted | None:
    """Any other elementwise op of one value."""
    if not _is_of_one_value(site):
        return None
    node, (x,), mode = site.node, site.random, site.options.activation
    graph, extras = cut(node, [x], site.new.random)
    if extras:
        module = activation.elementwise(graph, mode, dtype_of(node), graph=graph)
    else:
        function = Pointwise(node.target, _at(site), node.args, node.kwargs)
        op, settings = (node.target if _at(site) == 0 else None), (node.args[1:], node.kwargs)
        module = activation.elementwise(function, mode, dtype_of(node), op, settings, graph)
    return _elementwise(site, module, x, extras, "elementwise")


def delta(site: OpSite) -> Emitted | None:
    """An elementwise op of several values, or of one that it broadcasts: linearised in each argument."""
    if site.kwargs or not is_pointwise(site.op) or not fits(site) or _must_be_built(site):
        return None
    value = site.new.emit(site.node.name, Delta(site.op), map_arg(site.args, site.new.value))
    return Emitted(value, "delta", "linearised in each argument, arguments independent")


def own_jacobian(site: OpSite) -> Emitted | None:
    """Anything with a derivative, as a function of the nearest uncertain values."""
    if not is_differentiable(site.op):
        return None
    piece, extras = site.new.piece(site.node)
    value, note = _linearised(site, piece, site.new.sources(site.node), extras)
    return Emitted(value, "Jacobian", note)


STRATEGIES: tuple[Strategy, ...] = (fused, built, function_rule, closed_form, elementwise, delta, own_jacobian)
FOR_FAILED: tuple[Strategy, ...] = (own_jacobian,)  # for an op whose rule did not run on the example


# -- whether a rule is made for such arguments


def fits(site: OpSite) -> bool:
    """Whether the rules for the op, if there are any, are made for such arguments."""
    if site.reads_virtual:
        return False
    if site.occurrences > len(site.random) and not is_pointwise(site.op) and not facts(site.op).joins:
        return False  # a product of a value with itself, which rules for products take for one of strangers
    if not site.options.full or not site.loose:
        return True
    if site.is_unbatched:  # not to be broadcast: the first dimension of a parameter is no batch
        same = shape_of(site.random[0]) == shape_of(site.node)
        return len(site.random) == 1 and not facts(site.op).reads_weight and (same or not is_pointwise(site.op))
    if facts(site.op).reads_weight:
        return _is_layer(site)
    return facts(site.op).broadcasts or is_pointwise(site.op)


def _is_layer(site: OpSite) -> bool:
    """Whether the values without a batch are stored weights, and the input has a batch."""
    if any(site.weight(r) is None for r in site.loose):
        return False
    inputs: Any = site.args[1 if site.op == aten.addmm.default else 0]
    if site.op in (aten.matmul.default, aten.mm.default) and len(shape_of(site.args[1]) or ()) != 2:
        return False
    return inputs not in site.loose and len(shape_of(inputs) or ()) > 1


def _must_be_built(site: OpSite) -> bool:
    """In the full structure a stored weight has no batch: only builders know what to do with it."""
    return site.options.full and bool(site.loose) and facts(site.op).reads_weight


def _must_be_pointwise(site: OpSite) -> bool:
    """In the full structure, a parameter that meets samples in an op whose rule does not broadcast it."""
    if not site.options.full or not site.loose or facts(site.op).reads_weight:
        return False
    return not site.is_unbatched and not facts(site.op).broadcasts


def _is_of_one_value(site: OpSite) -> bool:
    if not is_pointwise(site.op) or not fits(site) or _must_be_built(site) or len(site.random) > 1:
        return False
    return site.random[0] in site.args and shape_of(site.random[0]) == shape_of(site.node)


def _at(site: OpSite) -> int:
    """Which argument the one uncertain value is."""
    return site.args.index(site.random[0])


# -- what several of them do


def _elementwise(
    site: OpSite, module: nn.Module, x: fx.Node, extras: list[fx.Node], label: str, is_whole: bool = False
) -> Emitted:
    inputs = (site.new.value(x), *map(site.new.plain, extras))
    value = site.new.emit(site.node.name, module, inputs)
    if not isinstance(module, MomentMatched):
        return Emitted(value, label, _activation_note(site), is_whole=is_whole)
    note = _activation_note(site) + module.limit
    return Emitted(value, label, note, (module, inputs), is_whole=is_whole)


def _linearised(site: OpSite, piece: Piece, sources: list[fx.Node], extras: list[fx.Node]) -> tuple[fx.Node, str]:
    """A piece as a function of independent values, and what that assumes."""
    new, full = site.new, site.options.full
    if full:
        module: nn.Module = Linearised(piece)
    else:
        apart = [s not in new.unbatched and keeps_apart(piece, s, sources, extras, new.traced) for s in sources]
        module = LinearisedVariances(piece, apart)
    value = new.emit(site.node.name, module, (*map(new.value, sources), *map(new.plain, extras)))
    if len(sources) == 1 and piece.affine[0] and full:
        return value, "exact"
    columns = sum(new.entries(s) for s in sources)
    kept = "linearised by its own Jacobian" if full else "linearised by its own Jacobian, squared"
    return value, f"{kept}: as much work as {columns} times the op"


def _activation_note(site: OpSite) -> str:
    return "linearised" if site.options.activation == "linearise" else "first two moments matched"
