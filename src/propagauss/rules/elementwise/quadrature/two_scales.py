"""First two moments of smooth activations that are straight lines far from zero: tanh, GELU, softplus and the like.

Two rules share the work, and each needs few nodes, with weights that are the same for all entries:

    narrow, s <= S:  E[f] = Σ_k w_k f(m + s z_k),                z_k equidistant (the trapezoidal rule)
    wide, s >= S:    E[f] = E[a(x)] + Σ_k w_k r(x_k) φ((x_k - m)/s)/s,   a the two straight lines, r = f - a

The trapezoidal rule converges exponentially for functions that are smooth at the scale of its step. In the wide rule
the function is evaluated once, when the rule is built: `r` vanishes away from zero, and what remains are moments of
straight lines, in closed form. For small values, calls cost more than the numbers in them: if the largest deviation is
no more than `2 S`, all entries take the narrow rule, with half its step.

Whether a function is of this kind, and how many nodes it takes, is not guessed: `two_scales` compares with a fine
quadrature over all means and variances that matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, fx, nn

from propagauss.rules.elementwise.pieces import normal_tail
from propagauss.rules.elementwise.quadrature.design import Function, Keyed, agrees, grid, reference
from propagauss.rules.elementwise.quadrature.sums import Found, in_blocks, lifted, moments, raised

aten = torch.ops.aten

# smooth and defined everywhere
_SMOOTH = {
    *(aten.tanh.default, aten.sigmoid.default, aten.erf.default, aten.gelu.default, aten.silu.default),
    *(aten.mish.default, aten.softplus.default, aten.log_sigmoid.default, aten.square.default, aten.neg.default),
    *(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.clone.default, aten.alias.default),
}
REACH = 8.0  # standard deviations
LENGTHS = (6.0, 8.0, 12.0, 18.0, 24.0)  # how far from zero a function may bend
NEGLIGIBLE = 1e-9  # distance from the straight line

BORDER = 1.4  # S
SMALL = 2048  # entries
NARROW = (21, 25, 29, 33, 37, 41)  # numbers of nodes to choose from
WIDE = (8, 12, 16, 20, 24, 28)  # on each side of zero


@dataclass(frozen=True)
class Lines:
    """`left[0] + left[1] x` below `-length`, `right[0] + right[1] x` above `length`."""

    left: tuple[float, float]
    right: tuple[float, float]
    length: float


class TwoScales(nn.Module):
    """`E[g]`, `Var[g]` and `E[g']` from `m` and `v`, both rules."""

    narrow_nodes: Tensor
    narrow_weights: Tensor
    fine_nodes: Tensor
    fine_weights: Tensor
    wide_nodes: Tensor
    wide_weights: Tensor
    eps: Tensor

    def __init__(self, function: nn.Module, lines: Lines, nodes: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        self.function, self.lines = function, lines
        narrow, wide = nodes
        x, table = _table(function, lines, wide)
        tables = {"wide_nodes": x.view(-1, 1, 1), "wide_weights": table, "eps": torch.tensor(torch.finfo(dtype).eps)}
        for name, count in {"narrow": narrow, "fine": 2 * narrow - 1}.items():
            z = torch.linspace(-REACH, REACH, count, dtype=torch.float64).view(-1, 1, 1)
            w = torch.exp(-0.5 * z * z)
            tables |= {f"{name}_nodes": z, f"{name}_weights": w / w.sum()}
        for name, value in tables.items():
            self.register_buffer(name, value.to(dtype))

    def forward(self, m: Tensor, v: Tensor, slope: bool = True) -> Found:
        """Each rule for its own entries, where a program may look at values; in a graph, both for all of them.

        The slope only if it is asked for.
        """
        is_wide = v > BORDER**2
        is_any = _any(is_wide) if v.shape == m.shape else None
        if is_any and m.numel() <= SMALL and not _any(v > (2 * BORDER) ** 2):
            return self.fine(m, v, slope)
        if is_any is None:
            found, wide = self.narrow(m, v.clamp(max=BORDER**2), slope), self.wide(m, v)
            merged = [torch.where(is_wide, a, b) for a, b in zip(wide, found, strict=True) if b is not None]
            return merged[0], merged[1], merged[2] if slope else None
        found = in_blocks(self.narrow, m, v, slope)
        if not is_any:
            return found
        places = is_wide.flatten().nonzero().squeeze(1)
        wide = self.wide(m.take(places), v.take(places))
        merged = [
            b.flatten().index_copy(0, places, a).view_as(b) for a, b in zip(wide, found, strict=True) if b is not None
        ]
        return merged[0], merged[1], merged[2] if slope else None

    def narrow(self, m: Tensor, v: Tensor, slope: bool = True) -> Found:
        nodes = lifted(self.narrow_nodes, m), lifted(self.narrow_weights, m)
        return moments(self.function, m, raised(m, v, self.eps), nodes, slope)

    def fine(self, m: Tensor, v: Tensor, slope: bool = True) -> Found:
        """As `narrow`, with half its step and as exact up to `2 S`: for small values one rule costs less than two."""
        nodes = lifted(self.fine_nodes, m), lifted(self.fine_weights, m)
        return moments(self.function, m, raised(m, v, self.eps), nodes, slope)

    def wide(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With `d = g - a`, `a` the line on the side of the mean, on both sides of zero:

            E[g] = a(m) + E[d],    Var[g] = b² v + 2 b E[(x - m) d] + E[d²] - E[d]²,    E[g'] = b + E[(x - m) d] / v

        All but the first terms vanish with the probability of being near zero or on its other side.
        """
        floored = v.clamp(min=BORDER**2)
        scale = floored.rsqrt()
        ratio, distance, positive = m * scale, m.abs(), m > 0
        u = torch.addcmul(-ratio, scale, lifted(self.wide_nodes, m))
        density = torch.exp((u * (-0.5 * u)).clamp(min=-60))  # products with less are subnormal numbers, which are slow
        first, with_x, left, right = (_weighted(self.wide_weights, density) * scale).unbind(0)
        along, second = torch.addcmul(with_x, m, first, value=-1), torch.where(positive, right, left)
        # beyond zero, seen from the mean: there d is the other line minus the own one, plus what is in the tables
        beyond = normal_tail(ratio.abs())
        at = torch.exp(ratio * (-0.5 * ratio)) * (floored * scale) * (1 / math.sqrt(2 * math.pi))
        reach = torch.addcmul(at, beyond, distance, value=-1)  # E[|x|; beyond]
        (a_left, b_left), (a_right, b_right) = self.lines.left, self.lines.right
        jump, kink = a_right - a_left, b_right - b_left
        is_right = positive.to(m.dtype)
        sign = 2 * is_right - 1
        if jump:
            first = torch.addcmul(first, sign, beyond, value=-jump)
            along = torch.add(along, at, alpha=jump)
            second = torch.add(second, beyond, alpha=jump * jump)
        if kink:
            mass = floored * beyond
            first = torch.add(first, reach, alpha=kink)
            along = torch.addcmul(along, sign, mass, value=-kink)
            second = torch.add(second, torch.addcmul(mass, distance, reach, value=-1), alpha=kink * kink)
        if jump and kink:
            second = torch.addcmul(second, sign, reach, value=-2 * kink * jump)
        variance = torch.addcmul(second, first, first, value=-1)
        slope, mean = along / floored, first
        if b_left or b_right:
            b = kink * is_right + b_left
            variance = torch.addcmul(variance, b, torch.addcmul(2 * along, b, floored))
            slope, mean = slope + b, torch.addcmul(mean, b, m)
        if a_left or a_right:
            mean = mean + (jump * is_right + a_left)
        return mean, variance.clamp(min=0), slope


def _any(condition: Tensor) -> bool | None:
    """Whether it holds anywhere, if that is known. Values inside graphs, maps or other devices are not read."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if is_traced or condition.device.type != "cpu":
        return None
    try:
        return bool(condition.any())
    except RuntimeError:  # inside vmap, or a tensor without values
        return None


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """`Σ_k weights[i, k] values[k]` for every `i`"""
    return (weights @ values.reshape(len(values), -1)).reshape(-1, *values.shape[1:])


def _table(function: Function, lines: Lines, nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes on both sides of zero, and per node what multiplies `φ((x - m)/s)/s` in `E[d]`, `E[x d]` and in `E[d²]`
    for means on the left and on the right; without what straight lines contribute."""
    x, w = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(nodes))
    x, w = lines.length * (x + 1) / 2, lines.length * w / 2 / math.sqrt(2 * math.pi)
    x, w = torch.cat([-x.flip(0), x]), torch.cat([w.flip(0), w])
    left, right = (a + b * x for a, b in (lines.left, lines.right))
    y = function(x)
    own = torch.where(x > 0, right, left)
    rest = y - own
    from_left, from_right = ((y - line).square() - (own - line).square() for line in (left, right))
    return x, torch.stack([w * rest, w * x * rest, w * from_left, w * from_right])


# -- which functions, and how many nodes


def two_scales(graph: fx.GraphModule, dtype: torch.dtype) -> TwoScales | None:
    """The rule for an elementwise function of one variable; None if it is not of this kind."""
    ops = [n for n in graph.graph.nodes if n.op != "output"]
    if not all(_is_smooth(n) if i else n.op == "placeholder" for i, n in enumerate(ops)):
        return None
    found = _design(Keyed(graph))
    return None if found is None else TwoScales(graph, *found, dtype)


def _is_smooth(node: fx.Node) -> bool:
    if node.target == aten.pow.Tensor_Scalar:
        return node.args[1] in (2, 3)
    if node.target in (aten.div.Tensor, aten.div.Scalar):
        return not isinstance(node.args[1], fx.Node)
    return node.target in _SMOOTH


@cache
def _design(function: Keyed) -> tuple[Lines, tuple[int, int]] | None:
    g = function.graph
    with torch.no_grad():
        lines = straight_lines(g)
        if lines is None:
            return None
        m, s = grid()
        true = reference(g, m, s)
        is_narrow = s <= BORDER

        def fewest(places: dict[str, Tensor], sizes: tuple[int, ...]) -> int | None:
            for size in sizes:
                rule = TwoScales(g, lines, (size, size), torch.float64)
                found = [(w, getattr(rule, name)(m[w], s[w].square())) for name, w in places.items()]
                if all(agrees(f, tuple(t[w] for t in true), s[w]) for w, f in found):
                    return size
            return None

        narrow = fewest({"narrow": is_narrow, "fine": s <= 2 * BORDER}, NARROW)
        wide = fewest({"wide": ~is_narrow}, WIDE)
    return None if narrow is None or wide is None else (lines, (narrow, wide))


def straight_lines(g: Function) -> Lines | None:
    """The lines that the function is on far from zero, if it is."""
    far = torch.logspace(math.log10(LENGTHS[0]), 5, 400, dtype=torch.float64)
    found: list[tuple[float, float]] = []
    length = LENGTHS[0]
    for side in (-1.0, 1.0):
        x = side * far
        ends = g(torch.tensor([64.0, 128.0], dtype=torch.float64) * side)
        b = _rounded(float(ends[1] - ends[0]) / (64 * side))
        a = _rounded(float(ends[0]) - b * 64 * side)
        off = ~((g(x) - (a + b * x)).abs() <= NEGLIGIBLE)
        if bool(off.any()):
            beyond = float(far[off].max())
            length = max(length, min((n for n in LENGTHS if n > beyond), default=math.inf))
        found.append((a, b))
    return Lines(found[0], found[1], length) if math.isfinite(length) else None


def _rounded(value: float) -> float:
    return float(round(value)) if abs(value - round(value)) < 1e-12 else value  # 0 and 1 come with rounding errors
