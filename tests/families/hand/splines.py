"""Kolmogorov-Arnold networks: a function per edge, as splines, bumps or polynomials."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.hand.register import Register, vectors

FAMILIES = Register("science")


class Splines(nn.Module):
    """KAN layer: B-splines of degree k on each edge, by the Cox-de Boor recursion, beside a SiLU."""

    def __init__(self, inside: int, outside: int, grid: int = 4, degree: int = 3):
        super().__init__()
        self.degree = degree
        self.base = nn.Linear(inside, outside)
        self.weight = nn.Parameter(torch.randn(outside, inside, grid + degree) / inside)
        self.register_buffer("knots", torch.linspace(-3, 3, grid + 2 * degree + 1))

    def forward(self, x: Tensor) -> Tensor:
        x_, t = x[..., None], self.knots
        basis = ((x_ >= t[:-1]) & (x_ < t[1:])).to(x.dtype)
        for k in range(1, self.degree + 1):
            left = (x_ - t[: -(k + 1)]) / (t[k:-1] - t[: -(k + 1)]) * basis[..., :-1]
            right = (t[k + 1 :] - x_) / (t[k + 1 :] - t[1:-k]) * basis[..., 1:]
            basis = left + right
        return self.base(F.silu(x)) + F.linear(basis.flatten(1), self.weight.flatten(1))


FAMILIES("KAN, B-splines")(lambda: (nn.Sequential(Splines(4, 6), Splines(6, 2)), (vectors(4),)))


class Radial(nn.Module):
    """FastKAN layer: Gaussian bumps in place of splines."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(inside), nn.Linear(5 * inside, outside)
        self.register_buffer("centres", torch.linspace(-2, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.exp(-((self.norm(x)[..., None] - self.centres) ** 2)).flatten(-2))


FAMILIES("KAN, radial")(lambda: (nn.Sequential(Radial(4, 6), Radial(6, 2)), (vectors(4),)))


class Chebyshev(nn.Module):
    """ChebyKAN layer: polynomials of tanh(x)."""

    def __init__(self, inside: int, outside: int, degree: int = 3):
        super().__init__()
        self.weight, self.degree = nn.Parameter(torch.randn(inside, outside, degree + 1) / inside), degree

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(self.degree + 1)
        basis = torch.cos(order * torch.acos(torch.tanh(x).clamp(-0.999, 0.999))[..., None])
        return torch.einsum("bid,iod->bo", basis, self.weight)


FAMILIES("KAN, Chebyshev")(lambda: (nn.Sequential(Chebyshev(4, 6), Chebyshev(6, 2)), (vectors(4),)))
