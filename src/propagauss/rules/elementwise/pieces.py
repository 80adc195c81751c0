"""First two moments of a piecewise polynomial `g(x)`, `x ~ N(m, v)`, in closed form.

With `x = m + s z`, `g` is measured from the value that the piece of the mean has at the mean, so that every deviation
is small where it should be; `I_i = ∫ z^i φ(z) dz` over a piece comes from `φ` and `Φ` at its borders:

    δ      = Σ_j Σ_i q_ji I_ji                    E[g]  = g(m) + δ        (q_j: coefficients of piece j in z)
    Var[g] = Σ_j ∫ (q_j(z) - δ)² φ(z) dz          E[g'] = Σ_j ∫ q_j'(z) φ(z) dz / s + Σ_k J_k φ(a_k) / s

The variance is a sum over the pieces of terms none of which is negative. `J_k` is the jump at knot `k`, and
`a_k = (k - m)/s`: with it `E[g']` is the regression slope `Cov(x, g)/v` of a function that jumps, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]  # c0 + c1 x + c2 x²
Value = Tensor | float
ZERO: Polynomial = (0.0, 0.0, 0.0)
IDENTITY: Polynomial = (0.0, 1.0, 0.0)
FAR = 30.0  # standard deviations: all terms are 0 or 1 beyond, and not yet subnormal numbers, which are slow


_TAIL = (
    -6.717940840639386e-01,
    6.726432239564942e-01,
    4.734330801947867e-02,
    -4.689560948545531e-02,
    -9.872721153144042e-03,
    8.824933281983551e-03,
    1.759264915142213e-03,
    -2.345825840322811e-03,
    -1.479846493360251e-04,
    6.739603547799815e-04,
    -8.858317850433923e-05,
    -1.755877642637998e-04,
    6.234283051706802e-05,
    3.469238698119373e-05,
    -2.076552335690531e-05,
    -3.725151048464793e-06,
    3.161067352923505e-06,
)  # coefficients of log(erfc(z) exp(z²) / t) in powers of 2t - 1, t = 2/(2 + z), relative error 1e-11


def constant(value: float) -> Polynomial:
    return (float(value), 0.0, 0.0)


@dataclass(frozen=True)
class Pieces:
    """`polynomials[j]` holds between `knots[j - 1]` and `knots[j]`; a knot itself belongs to the piece on its left."""

    knots: tuple[float, ...]
    polynomials: tuple[Polynomial, ...]

    def __post_init__(self) -> None:
        assert len(self.polynomials) == len(self.knots) + 1
        assert list(self.knots) == sorted(self.knots)

    def __call__(self, x: Tensor) -> Tensor:
        return _chosen(self.knots, [_value(p, x) for p in self.polynomials], x)

    @cached_property
    def steps(self) -> list[Polynomial]:
        """What is added at each knot, in powers of `x - knot`: jump, change of slope, half the change of curvature."""
        return [_step(*each) for each in zip(self.knots, self.polynomials, self.polynomials[1:], strict=False)]

    @cached_property
    def jumps(self) -> bool:
        return any(jump for jump, *_ in self.steps)

    def moments(
        self, m: Tensor, v: Tensor, function: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`E[g]`, `Var[g]` and `E[g']`; `g(m)`, 0 and `g'(m)` at zero variance.

        In double precision, since far from the mean a piece is the small difference of large terms. Of a `function`
        that is the same, the value at a knot is taken, too.
        """
        mean, variance, slope = self._moments(wide(m), wide(v), function or self)
        return mean.to(m.dtype), variance.to(m.dtype), slope.to(m.dtype)

    def _moments(self, m: Tensor, v: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        floored = v.clamp(min=torch.finfo(v.dtype).tiny ** 0.5)
        share, s = v / floored, floored.sqrt()  # below the floor, moments are extrapolated linearly in `v`
        borders = _borders([k - m for k in self.knots], s)
        y = function(m)
        masses = _by_polynomial(self.polynomials, borders)
        slopes = [_value((p[1], 2 * p[2], 0.0), m) for p in masses]
        # the pieces as polynomials in z, minus the value at the mean: 0 in the mean's own piece
        shapes = [(_value(p, m) - y, _times(b, s), _times(p[2], floored)) for b, p in zip(slopes, masses, strict=True)]
        integrals = list(masses.values())
        shift = _plus(*[_expectation(q, each) for q, each in zip(shapes, integrals, strict=True)])
        squares = [_square((q0 - shift, *rest), each) for (q0, *rest), each in zip(shapes, integrals, strict=True)]
        variance = _plus(*[square.clamp(min=0) for square in squares])
        bent = [_times(2 * p[2], s) for p in masses]
        slope = _plus(*[_expectation(q, each) for *q, each in zip(slopes, bent, integrals, strict=True)])
        jumps = _plus(*[_times(jump, b.density) for b, (jump, *_) in zip(borders, self.steps, strict=True)])
        slope = _plus(slope, _times(jumps, share / s) if self.jumps else 0.0)
        slope = slope if isinstance(slope, Tensor) else torch.full_like(m, slope)
        return y + share * shift, share * variance, slope


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """`Φ(a)` and `Φ(-a)`; in double precision the smaller one is right to its last digits.

    In single precision `torch.special.ndtr` does, which is off by 1e-7, at half the cost.
    """
    if a.dtype != torch.float64:
        return torch.special.ndtr(a), torch.special.ndtr(-a)
    tail = normal_tail(a.abs())
    positive = a > 0
    return torch.where(positive, 1 - tail, tail), torch.where(positive, tail, 1 - tail)


def normal_tail(u: Tensor) -> Tensor:
    """`Φ(-u)` for `u >= 0`"""
    z = u * math.sqrt(0.5)
    if not torch.compiler.is_exporting():
        return 0.5 * torch.erfc(z)
    t, logarithm = _logarithm(z)
    return 0.5 * t * torch.exp(logarithm - z * z)


def _logarithm(z: Tensor) -> tuple[Tensor, Tensor]:
    """`t` and `log(erfc(z) exp(z²) / t)`, as runtimes of exported graphs lack error functions in double precision."""
    t = 2 / (2 + z)
    y = 2 * t - 1
    total = y * _TAIL[-1] + _TAIL[-2]
    for c in reversed(_TAIL[:-2]):  # they are so small that no digits are lost in powers
        total = total * y + c
    return t, total


def wide(t: Tensor) -> Tensor:
    """In double precision, for what is the small difference of large terms."""
    return t if t.device.type == "mps" else t.double()  # there is no double precision on that device


class _Border(NamedTuple):
    """A border of a piece in standard deviations from the mean, and the normal distribution there."""

    at: Tensor
    density: Tensor
    below: Tensor
    above: Tensor


def _borders(distances: list[Tensor], s: Tensor) -> list[_Border]:
    """All at once, since calls cost more than the numbers in them."""
    if not distances:
        return []
    a = (torch.stack(distances) / s).clamp(-FAR, FAR)
    density = torch.exp(a * a * -0.5) * (1 / math.sqrt(2 * math.pi))
    columns = (t.unbind(0) for t in (a, density, *split(a)))
    return [_Border(*each) for each in zip(*columns, strict=True)]


def _by_polynomial(polynomials: tuple[Polynomial, ...], borders: list[_Border]) -> dict[Polynomial, list[Value]]:
    """`∫ z^i φ(z) dz` over all pieces where a polynomial holds: hard shrinkage is the identity on both sides."""
    found: dict[Polynomial, list[Value]] = {}
    for polynomial, low, high in zip(polynomials, [None, *borders], [*borders, None], strict=True):
        integrals = _integrals(low, high, polynomial)
        before = found.get(polynomial)
        found[polynomial] = (
            integrals if before is None else [_plus(*pair) for pair in zip(before, integrals, strict=True)]
        )
    return found


def _integrals(low: _Border | None, high: _Border | None, polynomial: Polynomial) -> list[Value]:
    """`∫ z^i φ(z) dz` between two borders (None: infinity), `i` up to twice the degree of the polynomial there."""
    if low is None and high is None:
        mass = 1.0
    elif low is None or high is None:
        mass = high.below if low is None else low.above  # type: ignore[union-attr]
    else:
        mass = torch.where(low.at > 0, low.above - high.above, high.below - low.below)
    _, c1, c2 = polynomial
    if not (c1 or c2):
        return [mass]

    def drop(power: int) -> Value:
        """`a^i φ(a)` at the lower border minus the same at the upper one."""
        at_low, at_high = (0.0 if b is None else _times(*[b.at] * power, b.density) for b in (low, high))
        return at_low - at_high

    first, second = drop(0), _plus(mass, drop(1))
    if not c2:
        return [mass, first, second]
    return [mass, first, second, _plus(2 * first, drop(2)), _plus(3 * second, drop(3))]


# -- sums and products that leave out what is 0 or 1: coefficients of pieces often are


def _plus(*values: Value) -> Any:
    total: Value = sum([v for v in values if not isinstance(v, Tensor)])
    for v in values:
        if isinstance(v, Tensor):
            total = total + v if isinstance(total, Tensor) or total else v
    return total


def _times(*values: Value) -> Any:
    product: Value = math.prod([v for v in values if not isinstance(v, Tensor)])
    for v in values:
        if isinstance(v, Tensor) and (isinstance(product, Tensor) or product):
            product = product * v if isinstance(product, Tensor) or product != 1 else v
    return product


def _value(polynomial: Polynomial, x: Tensor) -> Value:
    c0, c1, c2 = polynomial
    return _plus(c0, _times(x, _plus(c1, _times(c2, x))))


def _expectation(q: Sequence[Value], integrals: list[Value]) -> Value:
    return _plus(*[_times(a, b) for a, b in zip(q, integrals, strict=False)])


def _square(q: tuple[Value, ...], integrals: list[Value]) -> Tensor:
    """Of the square. A piece without mass may be far away: its deviations do not overflow, as none is squared alone."""
    a, b, c = q
    mixed = _expectation((a, _times(2.0, b), _times(2.0, c)), integrals)
    return _plus(_times(mixed, a), _expectation((_times(b, b), _times(2.0, b, c), _times(c, c)), integrals[2:]))


def _chosen(knots: tuple[float, ...], values: list[Value], x: Tensor) -> Tensor:
    """The value that belongs to the piece that every entry of `x` lies in."""
    chosen = torch.full_like(x, values[0]) if isinstance(values[0], float) else values[0]
    for k, value in zip(knots, values[1:], strict=True):
        chosen = torch.where(x > k, value, chosen)
    return chosen  # type: ignore[return-value]


def _step(knot: float, before: Polynomial, after: Polynomial) -> Polynomial:
    c0, c1, c2 = (b - a for a, b in zip(before, after, strict=True))
    jump = c0 + knot * (c1 + knot * c2)
    size = max(abs(c0), abs(c1 * knot), abs(c2 * knot * knot))
    return (0.0 if abs(jump) <= 1e-12 * size else jump, c1 + 2 * c2 * knot, c2)  # no jump: rounding
