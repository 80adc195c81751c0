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
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]  # c0 + c1 x + c2 x²
ZERO: Polynomial = (0.0, 0.0, 0.0)
IDENTITY: Polynomial = (0.0, 1.0, 0.0)
FAR = 1e3  # standard deviations, far beyond where all terms are 0 or 1; powers of it must not overflow


_TAIL = (
    -6.513268598909e-01,
    6.419697923565e-01,
    1.947647320419e-02,
    -9.561514786809e-03,
    -9.465953444819e-04,
    3.668394978526e-04,
    4.252332480681e-05,
    -2.027857811256e-05,
    -1.624290004642e-06,
    1.303655835362e-06,
    1.562644197763e-08,
    -8.523809602585e-08,
    6.529054645911e-09,
    5.059343395862e-09,
    -9.913640069838e-10,
    -2.273651762979e-10,
    9.646811990123e-11,
)  # Chebyshev coefficients of log(erfc(z) exp(z²) / t), t = 2/(2 + z), relative error 1e-11


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
        c = _chosen(self, x)
        return c[0] + x * (c[1] + x * c[2])

    @property
    def steps(self) -> list[Polynomial]:
        """What is added at each knot, in powers of `x - knot`: jump, change of slope, half the change of curvature."""
        return [_step(*each) for each in zip(self.knots, self.polynomials, self.polynomials[1:], strict=False)]

    @property
    def jumps(self) -> bool:
        return any(jump for jump, *_ in self.steps)

    def moments(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`E[g]`, `Var[g]` and `E[g']`; `g(m)`, 0 and `g'(m)` at zero variance.

        In double precision, since far from the mean a piece is the small difference of large terms.
        """
        mean, variance, slope = self._moments(wide(m), wide(v))
        return mean.to(m.dtype), variance.to(m.dtype), slope.to(m.dtype)

    def _moments(self, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        floored = v.clamp(min=torch.finfo(v.dtype).tiny ** 0.5)
        share, s = v / floored, floored.sqrt()  # below the floor, moments are extrapolated linearly in `v`
        borders = [_border((k - m) / s) for k in self.knots]
        shapes = self._from_the_mean(m, s)
        curved = any(p[2] for p in self.polynomials)
        masses = [_integrals(low, high, m, curved) for low, high in _neighbours(borders)]
        # a piece without mass may be so far away that its deviations overflow when squared
        shapes = [(torch.where(mass[0] > 0, q[0], 0.0), *q[1:]) for q, mass in zip(shapes, masses, strict=True)]
        shift = sum((_expectation(q, mass) for q, mass in zip(shapes, masses, strict=True)), torch.zeros_like(m))
        variance = torch.zeros_like(m)
        slope = torch.zeros_like(m)
        for (q0, *rest), mass in zip(shapes, masses, strict=True):
            variance = variance + _expectation(_squared((q0 - shift, *rest)), mass).clamp(min=0)
            slope = slope + (rest[0] * mass[0] + (2 * rest[1] * mass[1] if curved else 0.0)) / s
        for border, (jump, *_) in zip(borders, self.steps, strict=True):
            if jump:
                slope = slope + share * jump * border.density / s
        return self(m) + share * shift, share * variance, slope

    def _from_the_mean(self, m: Tensor, s: Tensor) -> list[tuple[Tensor, ...]]:
        """The pieces as polynomials in `z`, minus the value of the mean's own piece at the mean: exactly 0 there."""
        _, c1, c2 = _chosen(self, m)
        own = (torch.zeros_like(m), (c1 + 2 * c2 * m) * s, c2 * s * s)
        passed = [m > k for k in self.knots]
        steps = []
        for k, (jump, kink, bend) in zip(self.knots, self.steps, strict=True):
            u = m - k  # in powers of this nothing cancels close to the knot
            steps.append((jump + u * (kink + u * bend), (kink + 2 * bend * u) * s, bend * s * s))
        shapes = []
        for j in range(len(self.polynomials)):
            q = own
            for i, step in enumerate(steps):
                sign = torch.where(passed[i], 0.0, 1.0) if i < j else torch.where(passed[i], -1.0, 0.0)
                q = tuple(a + sign.to(m.dtype) * b for a, b in zip(q, step, strict=True))
            shapes.append(q)
        return shapes


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """`Φ(a)` and `Φ(-a)`; in double precision the smaller one is right to its last digits.

    In single precision `torch.special.ndtr` does, which is off by 1e-7, at half the cost.
    """
    if a.dtype != torch.float64:
        return torch.special.ndtr(a), torch.special.ndtr(-a)
    tail = _tail(a.abs() * math.sqrt(0.5))
    positive = a > 0
    return torch.where(positive, 1 - tail, tail), torch.where(positive, tail, 1 - tail)


def _tail(z: Tensor) -> Tensor:
    """`erfc(z) / 2` for `z >= 0`"""
    if not torch.compiler.is_exporting():
        return 0.5 * torch.erfc(z)
    t = 2 / (2 + z)  # runtimes of exported graphs lack error functions in double precision
    y = 4 * t - 2
    last, before = torch.zeros_like(y), torch.zeros_like(y)
    for c in reversed(_TAIL[1:]):  # Clenshaw
        last, before = y * last - before + c, last
    return 0.5 * t * torch.exp(0.5 * y * last - before + _TAIL[0] - z * z)


def wide(t: Tensor) -> Tensor:
    """In double precision, for what is the small difference of large terms."""
    return t if t.device.type == "mps" else t.double()  # there is no double precision on that device


class _Border(NamedTuple):
    """A border of a piece in standard deviations from the mean, and the normal distribution there."""

    at: Tensor
    density: Tensor
    below: Tensor
    above: Tensor


def _border(a: Tensor) -> _Border:
    a = a.clamp(-FAR, FAR)
    density = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    return _Border(a, density, *split(a))


def _neighbours(borders: list[_Border]) -> list[tuple[_Border | None, _Border | None]]:
    return list(zip([None, *borders], [*borders, None], strict=True))


def _integrals(low: _Border | None, high: _Border | None, m: Tensor, curved: bool) -> list[Tensor]:
    """`∫ z^i φ(z) dz` between two borders (None: infinity), `i` up to 2, or 4 for curved pieces."""
    if low is None and high is None:
        mass = torch.ones_like(m)
    elif low is None or high is None:
        mass = high.below if low is None else low.above  # type: ignore[union-attr]
    else:
        mass = torch.where(low.at > 0, low.above - high.above, high.below - low.below)

    def drop(power: int) -> Tensor | float:
        """`a^i φ(a)` at the lower border minus the same at the upper one."""
        at_low, at_high = (0.0 if b is None else b.at**power * b.density for b in (low, high))
        return at_low - at_high

    first = drop(0) + torch.zeros_like(m)
    second = mass + drop(1)
    if not curved:
        return [mass, first, second]
    return [mass, first, second, 2 * first + drop(2), 3 * second + drop(3)]


def _expectation(q: tuple[Tensor, ...], integrals: list[Tensor]) -> Tensor:
    total = q[0] * integrals[0]
    for coefficient, integral in zip(q[1:], integrals[1:], strict=False):
        total = total + coefficient * integral
    return total


def _squared(q: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    a, b, c = q
    return (a * a, 2 * a * b, b * b + 2 * a * c, 2 * b * c, c * c)


def _chosen(pieces: Pieces, x: Tensor) -> list[Tensor]:
    """Coefficients of the piece that every entry of `x` lies in."""
    chosen = [torch.full_like(x, c) for c in pieces.polynomials[0]]
    for k, polynomial in zip(pieces.knots, pieces.polynomials[1:], strict=True):
        beyond = x > k
        chosen = [torch.where(beyond, c, before) for c, before in zip(polynomial, chosen, strict=True)]
    return chosen


def _step(knot: float, before: Polynomial, after: Polynomial) -> Polynomial:
    c0, c1, c2 = (b - a for a, b in zip(before, after, strict=True))
    jump = c0 + knot * (c1 + knot * c2)
    size = max(abs(c0), abs(c1 * knot), abs(c2 * knot * knot))
    return (0.0 if abs(jump) <= 1e-12 * size else jump, c1 + 2 * c2 * knot, c2)  # no jump: rounding
