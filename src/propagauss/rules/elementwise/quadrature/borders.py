"""Where an elementwise function is not smooth, read off its graph: the borders of the panels that it is integrated on.

A *switch* is a value inside the function at whose sign something changes: `a - b` of a comparison `a > b` or of a
maximum, the argument of a ReLU. Where a switch is affine in the variable its root is written down; elsewhere roots are
looked for between the borders known so far, at most one in each gap, by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from propagauss.rules.elementwise.piecewise import PIECES
from propagauss.rules.elementwise.quadrature.panels import merged
from propagauss.rules.facts import facts, is_elementwise

aten = torch.ops.aten
BISECTIONS = 40
BENDS = (-2.0, 0.0, 2.0)  # where tanh and the like turn from one straight line into another, roughly

# something changes where two arguments are equal
_PAIRS = {aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default}
_PAIRS |= {aten.clamp_min.Tensor, aten.clamp_max.Tensor}
# not affine, but without a bend of their own
_MIXED = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar, aten.to.dtype}
_MIXED |= {aten._to_copy.default, aten.pow.Tensor_Tensor}

# by op, arguments at which it ends or is infinite
_ENDS: dict[Any, tuple[float, ...]] = {
    **dict.fromkeys((aten.log.default, aten.log2.default, aten.log10.default, aten.sqrt.default), (0.0,)),
    **dict.fromkeys((aten.rsqrt.default, aten.reciprocal.default), (0.0,)),
    **dict.fromkeys((aten.asin.default, aten.acos.default, aten.atanh.default, aten.erfinv.default), (-1.0, 1.0)),
    aten.log1p.default: (-1.0,),
    aten.acosh.default: (1.0,),
    aten.logit.default: (0.0, 1.0),
}
# numbers everywhere, and without overflow
_TOTAL = {aten.tanh.default, aten.sigmoid.default, aten.erf.default, aten.gelu.default, aten.silu.default}
_TOTAL |= {aten.mish.default, aten.softplus.default, aten.log_sigmoid.default, aten.elu.default, aten.selu.default}
_TOTAL |= {aten.celu.default, aten.atan.default, aten.sin.default, aten.cos.default, aten.where.self}
_TOTAL |= {*_PAIRS, *PIECES, aten.mul.Tensor, aten.mul.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf}

Switch = tuple[fx.Node, "fx.Node | float"]  # something changes where the first is equal to the second


class Borders(nn.Module):
    """From `m [*shape]` and the standard deviation, where the function is not smooth, in standard deviations.

    Without a graph, what is known of most activations is taken: they bend close to zero.
    """

    def __init__(self, function: fx.GraphModule | None):
        super().__init__()
        self.own: tuple[float, ...] = BENDS  # values of the variable itself
        self.kinks: tuple[float, ...] = ()  # those at which the function is not differentiable
        self.affine, self.bent, self.ends = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.is_total = function is not None and all(
            _is_total(n.target) for n in function.graph.nodes if n.op not in ("placeholder", "output")
        )
        if function is not None:
            affine, bent, ends = _switches(function)
            self.own = tuple(float(s[1]) for s in affine if _is_plain(s))  # type: ignore[arg-type]
            self.kinks = tuple(float(s[1]) for s, sharp in affine.items() if sharp and _is_plain(s))  # type: ignore[arg-type]
            self.affine.extend(_difference(function, s) for s in affine if not _is_plain(s))
            self.bent.extend(_difference(function, s) for s in bent)
            self.ends.extend(_difference(function, s) for s in ends)

    def forward(self, m: Tensor, s: Tensor, base: Tensor, *rest: Any) -> list[Tensor]:
        found = [(value - m) / s for value in self.own]
        for switch in self.affine:
            at, slope = _line(switch, m, *rest)
            root = -at / (torch.where(slope == 0, 1.0, slope) * s)
            found.append(torch.where(slope == 0, 0.0, root))
        if not self.bent:
            return found
        known = merged(base.reshape(-1, *[1] * m.dim()).expand(-1, *m.shape), found)
        for switch in self.bent:
            roots = _bisected(lambda x, f=switch: f(x, *rest), m, s, known.detach())
            found.extend(roots.unbind(0))
        return found

    def room(self, m: Tensor, *rest: Any) -> Tensor | None:
        """How far the mean is from where the function ends or is infinite, as far as that is known."""
        lines = [_line(end, m.detach(), *rest) for end in self.ends]
        distances = [torch.where(slope == 0, torch.inf, (at / slope).abs()) for at, slope in lines]
        return torch.stack(distances).amin(0) if distances else None


def _line(switch: nn.Module, m: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Value and slope of an affine function."""
    step = 1 + m.detach().abs()  # long enough for the difference of two values to be exact to the last digits
    at = switch(m, *rest)
    return at, (switch(m + step, *rest) - at) / step


def _bisected(d: Callable[[Tensor], Tensor], m: Tensor, s: Tensor, borders: Tensor) -> Tensor:
    """A root of `d(m + s z)` in each gap of `borders [Q + 1, *shape]` where its sign changes, else an end of the gap.

    The roots know how they move with `m` and `s`: `dz = -dd / (s d')`.
    """
    mean, scale = m.detach(), s.detach()
    low, high = borders[:-1], borders[1:]
    start = d(mean + scale * low) > 0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        same = (d(mean + scale * middle) > 0) == start
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    root = (low + high) / 2
    step = torch.finfo(m.dtype).eps ** (1 / 3)  # the derivative by differences: automatic ones fix the batch in exports
    slope = (d(mean + scale * (root + step)) - d(mean + scale * (root - step))) / (2 * step)
    moved = d(m + s * root)
    safe = (slope.abs() > torch.finfo(m.dtype).eps) & slope.isfinite() & moved.isfinite()
    moved = torch.where(safe, moved, 0.0)
    return root - (moved - moved.detach()) / torch.where(safe, slope, 1.0)


def _is_plain(switch: Switch) -> bool:
    """Whether the variable itself is compared with a number."""
    return switch[0].op == "placeholder" and not isinstance(switch[1], fx.Node)


def _difference(function: fx.GraphModule, switch: Switch) -> fx.GraphModule:
    """A switch as a function of the same arguments."""
    graph, env = fx.Graph(), {}
    for node in function.graph.nodes:
        if node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    value, offset = switch
    graph.output(graph.call_function(torch.sub, (env[value], env[offset] if isinstance(offset, fx.Node) else offset)))
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return fx.GraphModule(function, graph)


def _switches(function: fx.GraphModule) -> tuple[dict[Switch, bool], list[Switch], list[Switch]]:
    """Those that are affine in the variable, with whether they are kinks; the others; and affine ones where it ends.

    Each once.
    """
    variable = next(n for n in function.graph.nodes if n.op == "placeholder")
    depends, affine = {variable}, {variable}
    straight: dict[Switch, bool] = {}
    bent: dict[Switch, None] = {}
    ends: dict[Switch, None] = {}
    for node in function.graph.nodes:
        inputs = [a for a in node.all_input_nodes if a in depends]
        if node.op != "call_function" or not inputs:
            continue
        depends.add(node)
        if _is_affine(node, depends, affine):
            affine.add(node)
        ends |= {end: None for end in _ends(node) if end[0] in affine and end[0] in depends}
        for switch, sharp in _of(node):
            nodes = [n for n in switch if isinstance(n, fx.Node) and n in depends]
            if nodes and all(n in affine for n in nodes):
                straight[switch] = sharp or straight.get(switch, False)
            elif nodes and sharp:
                bent[switch] = None
    return straight, list(bent), list(ends)


def _is_total(op: Any) -> bool:
    """Whether an op of numbers is always a number."""
    return op in _TOTAL or facts(op).sums or facts(op).compares


def _is_affine(node: fx.Node, depends: set[fx.Node], affine: set[fx.Node]) -> bool:
    at = [i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a in depends]
    if not all(node.args[i] in affine for i in at):
        return False
    known = facts(node.target)
    return known.sums or (is_elementwise(node.target) and len(at) == 1 and known.linear_at(at[0]))


def _of(node: fx.Node) -> list[tuple[Switch, bool]]:
    """The switches of one op, and whether something is not differentiable there."""
    op, args = node.target, node.args
    known = facts(op)
    if known.compares or op in _PAIRS:
        first, second = args[:2] if isinstance(args[0], fx.Node) else reversed(args[:2])
        return [((first, second), True)]  # type: ignore[list-item]
    if op == aten.clamp.Tensor:
        limits = [*args[1:], *node.kwargs.values()]
        return [((args[0], limit), True) for limit in limits if limit is not None]  # type: ignore[list-item, misc]
    if op in PIECES:
        knots = PIECES[op](*args[1:], **node.kwargs).knots  # type: ignore[misc]
        bends = BENDS if op == aten.abs.default else ()  # as in x / (1 + |x|)
        return [((args[0], knot), knot in knots) for knot in dict.fromkeys((*knots, *bends))]  # type: ignore[misc]
    straight = known.sums or (is_elementwise(op) and known.linear_in)
    if straight or op in _MIXED or not isinstance(args[0], fx.Node):
        return []
    return [((args[0], bend), False) for bend in BENDS]


def _ends(node: fx.Node) -> list[Switch]:
    """Where an op ends or is infinite."""
    op, args = node.target, node.args
    if op == aten.div.Tensor and isinstance(args[1], fx.Node):
        return [(args[1], 0.0)]
    if op == aten.pow.Tensor_Scalar:
        is_polynomial = args[1] >= 0 and float(args[1]).is_integer()  # type: ignore[operator, arg-type]
        return [] if is_polynomial else [(args[0], 0.0)]  # type: ignore[list-item]
    return [(args[0], value) for value in _ENDS.get(op, ())]  # type: ignore[misc]
