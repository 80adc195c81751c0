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

from propagauss.rules.elementwise.panels import merged
from propagauss.rules.elementwise.piecewise import PIECES
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

Switch = tuple[fx.Node, "fx.Node | float"]  # something changes where the first is equal to the second


class Borders(nn.Module):
    """From `m [*shape]` and the standard deviation, where the function is not smooth, in standard deviations.

    Without a graph, what is known of most activations is taken: they bend close to zero.
    """

    def __init__(self, function: fx.GraphModule | None):
        super().__init__()
        self.own: tuple[float, ...] = BENDS  # values of the variable itself
        self.affine, self.bent = nn.ModuleList(), nn.ModuleList()
        if function is not None:
            affine, bent = _switches(function)
            self.own = tuple(float(s[1]) for s in affine if _is_plain(s))  # type: ignore[arg-type]
            self.affine.extend(_difference(function, s) for s in affine if not _is_plain(s))
            self.bent.extend(_difference(function, s) for s in bent)

    def forward(self, m: Tensor, s: Tensor, base: Tensor, *rest: Any) -> list[Tensor]:
        found = [(value - m) / s for value in self.own]
        step = 1 + m.detach().abs()  # long enough for the difference of two values to be exact to the last digits
        for switch in self.affine:
            at = switch(m, *rest)
            slope = (switch(m + step, *rest) - at) / step
            root = -at / (torch.where(slope == 0, 1.0, slope) * s)
            found.append(torch.where(slope == 0, 0.0, root))
        if not self.bent:
            return found
        known = merged(base.reshape(-1, *[1] * m.dim()).expand(-1, *m.shape), found)
        for switch in self.bent:
            roots = _bisected(lambda x, f=switch: f(x, *rest), m, s, known.detach())
            found.extend(roots.unbind(0))
        return found


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


def _switches(function: fx.GraphModule) -> tuple[list[Switch], list[Switch]]:
    """Those that are affine in the variable, and the others; each once."""
    variable = next(n for n in function.graph.nodes if n.op == "placeholder")
    depends, affine = {variable}, {variable}
    straight: dict[Switch, None] = {}
    bent: dict[Switch, None] = {}
    for node in function.graph.nodes:
        inputs = [a for a in node.all_input_nodes if a in depends]
        if node.op != "call_function" or not inputs:
            continue
        depends.add(node)
        if _is_affine(node, depends, affine):
            affine.add(node)
        for switch, sharp in _of(node):
            nodes = [n for n in switch if isinstance(n, fx.Node) and n in depends]
            if nodes and all(n in affine for n in nodes):
                straight[switch] = None
            elif nodes and sharp:
                bent[switch] = None
    return list(straight), list(bent)


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
