"""Sensitivities through a 3 x 3 convolution with a quarter of the products, where it is wide and its images are small.

The way back through a convolution is a convolution with the turned weight. Tiles of 4 x 4 entries of its result take 36
products for each pair of channels in place of 144, as in `tiles.py`:

    x = Pᵀ ((Cᵀ w) (Q g))

The weight is transformed once and for all. `Q` and `Pᵀ`, with padding and the cutting into tiles, are matrices for
whole images: small images make them small, and three products of matrices are all that runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from propagauss.rules.adjoints.forms import Form
from propagauss.rules.adjoints.tiles import BACK, OF_INPUTS, OF_SENSITIVITIES, POINTS, TILE, tiles_in

MOST_ENTRIES = 2**22  # of the transformed weight, which has four times those of the weight
LEAST_ROWS = 32  # sensitivities of a sample at each point, so that it is worth reading the transformed weight
WORTH = 0.4  # of the products of the convolution, which PyTorch does faster


def tiled_adjoint_pays(
    outputs: int, sizes: tuple[int, ...], places: tuple[int, ...], results: int, inputs: int
) -> bool:
    """For images `[inputs, *sizes]`, and results `[results, *places]`."""
    tiles, pixels, positions = tiles_in(*sizes), sizes[0] * sizes[1], places[0] * places[1]
    products = POINTS * tiles * (positions * results + pixels * inputs + results * inputs)
    few = outputs * tiles < LEAST_ROWS or POINTS * results * inputs > MOST_ENTRIES
    return not few and products < WORTH * 9 * positions * results * inputs


class TiledAdjoint(Form):
    """`[K, B, o, *places] -> [K, B, i, *sizes]` through a convolution with stride 1, no dilation and no groups."""

    weight: Tensor
    into_points: Tensor
    from_points: Tensor

    def __init__(self, weight: Tensor, sizes: tuple[int, ...], places: tuple[int, ...], padding: tuple[int, ...]):
        super().__init__()
        self.sizes = sizes
        back = torch.tensor(BACK, dtype=torch.float64)
        turned = weight.detach().double().flip(2, 3)
        points = torch.einsum("oiyx,ya,xb->aboi", turned, back, back)
        self.register_buffer("weight", points.reshape(POINTS, *weight.shape[:2]).to(weight))
        into = [_tiles(OF_INPUTS, n, m, p - 2) for n, m, p in zip(sizes, places, padding, strict=True)]
        out_of = [_tiles(OF_SENSITIVITIES, n, n, 0) for n in sizes]
        self.register_buffer("into_points", _both(*into).to(weight))
        self.register_buffer("from_points", _both(*out_of).to(weight))

    def forward(self, g: Tensor) -> Tensor:
        outputs, batch, results = g.shape[:3]
        count, inputs = outputs * batch, self.weight.shape[2]
        rows = self.into_points.shape[0] // POINTS * count
        values = self.into_points @ g.reshape(count * results, self.into_points.shape[1]).mT
        products = values.reshape(POINTS, rows, results) @ self.weight
        found = products.reshape(len(self.from_points), count * inputs).mT @ self.from_points
        return found.reshape(outputs, batch, inputs, *self.sizes)


def _tiles(rows: tuple[tuple[float, ...], ...], size: int, entries: int, start: int) -> Tensor:
    """What a transform does to a line: `[points, tiles, entries]`. The first tile is at `start`."""
    transform = torch.tensor(rows, dtype=torch.float64)
    found = torch.zeros(len(transform), -(-size // TILE), entries, dtype=torch.float64)
    for tile in range(found.shape[1]):
        for j in range(transform.shape[1]):
            at = start + TILE * tile + j
            if 0 <= at < entries:
                found[:, tile, at] = transform[:, j]
    return found


def _both(down: Tensor, right: Tensor) -> Tensor:
    """The same along both directions: `[36 tiles, entries of an image]`."""
    whole = torch.einsum("aty,bsx->abtsyx", down, right)
    return whole.reshape(-1, down.shape[2] * right.shape[2])
