"""The form by pairs of positions for a convolution on small images, without the products that padding makes zero.

A patch holds the image at shifts `d` of a position, so that the products of the patches at two positions are

    A_tso = Σ_i V_oi a_ti a_si = Σ_d Σ_c V_oc[d] x_c[t + d] x_c[s + d]

Where a shift leads out of the image at `t` or `s`, it adds nothing: half of all products for 3 x 3 on 4 x 4 images.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.rules.adjoints.forms import Form, Independent, added, gram, squares
from propagauss.rules.adjoints.positions import numbered_pairs, over_pairs

WORTH = 0.65  # of all products: what is saved has to pay for putting the parts of all shifts together
LARGE = 2**14  # entries of a weight for one shift


@dataclass(frozen=True)
class Geometry:
    """How a convolution meets its images."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Sizes of the result."""
        dims = zip(self.sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in dims)

    def shifts(self) -> list[tuple[Tensor, Tensor]]:
        """For each entry of the kernel, the positions at which it lies within the image, and where it lies there."""
        grids = [torch.arange(n) for n in self.places]
        found = []
        for shift in itertools.product(*map(range, self.kernel)):
            rules = zip(grids, shift, self.stride, self.padding, self.dilation, strict=True)
            along = [t * s + at * d - p for t, at, s, p, d in rules]
            inside = [(u >= 0) & (u < n) for u, n in zip(along, self.sizes, strict=True)]
            positions = _flat([g[i] for g, i in zip(grids, inside, strict=True)], self.places)
            found.append((positions, _flat([u[i] for u, i in zip(along, inside, strict=True)], self.sizes)))
        return found

    def worth_shifting(self) -> bool:
        positions = len(_flat([torch.arange(n) for n in self.places], self.places))
        counts = [len(t) * (len(t) + 1) for t, _ in self.shifts()]
        return sum(counts) <= WORTH * len(counts) * positions * (positions + 1)


def _flat(along: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """Numbers of all entries with these coordinates."""
    number = torch.zeros((), dtype=torch.long)
    for coordinate, size in zip(along, sizes, strict=True):
        number = number.unsqueeze(-1) * size + coordinate
    return number.flatten()


class ShiftedPairs(Form):
    """The form of a weight and, if given, of a bias, from `g [K, B, o, *places]` and images `x [B, c, *sizes]`."""

    variance: Tensor
    bias: Tensor | None
    numbers: Tensor

    def __init__(self, layer: Independent, full: bool, geometry: Geometry):
        super().__init__()
        self.full, shifts = full, geometry.shifts()
        by_shift = layer.weight.reshape(len(layer.weight), -1, len(shifts)).permute(2, 0, 1)
        self.register_buffer("variance", by_shift.contiguous())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.sqrt())
        count = len(_flat([torch.arange(n) for n in geometry.places], geometry.places))
        _, _, numbers = numbered_pairs(count, layer.weight.device)
        self.register_buffer("numbers", numbers)
        for d, (positions, pixels) in enumerate(shifts):
            first, second = torch.triu_indices(len(positions), len(positions))
            rows = torch.full((count * (count + 1) // 2,), len(first))  # those that a shift does not reach: the last
            rows[numbers.cpu()[positions[first], positions[second]]] = torch.arange(len(first))
            for name, value in (("first", pixels[first]), ("second", pixels[second]), ("rows", rows)):
                self.register_buffer(f"{name}_{d}", value.to(layer.weight.device))

    def forward(self, g: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        g, pixels = g.flatten(3), x.flatten(2).mT  # [B, pixels, c]
        if self.bias is not None:
            rows = g.sum(-1) * self.bias
            total = added(gram(rows) if self.full else squares(rows), total)
        pairs: Tensor | None = None
        for d, variance in enumerate(self.variance):
            first, second, rows = (self.get_buffer(f"{name}_{d}") for name in ("first", "second", "rows"))
            found = F.linear(pixels.index_select(1, first) * pixels.index_select(1, second), variance)
            if len(first) < len(rows):
                found = F.pad(found, (0, 0, 0, 1)).index_select(1, rows)
            pairs = found if pairs is None else pairs + found
        assert pairs is not None
        return added(over_pairs(g, pairs, self.numbers, self.full), total)
