"""The Jacobian of a 3 x 3 convolution's weight with a quarter of the products, where its images are large.

For an output `k`, `M_oi[d] = Σ_y g_o[y] a_i[y + d]` slides the sensitivities over the input, and three shifts `d` per
direction are wanted. A tile of four entries of `g` meets six of `a`, which takes twelve products. But the polynomials
that have these entries as coefficients may as well be multiplied by their values at six points (0, 1, -1, 2, -2 and
infinity: Toom and Cook, in neural networks Winograd's convolution):

    M = C Σ_tiles (P g) ⊙ (Q a),    P [6, 4], Q [6, 6], C [3, 6]

The same along both directions of an image has 36 products in place of 144. Since `C` comes after the sum over tiles,
that sum is a product of matrices for each of the 36 points: `[K o, tiles] x [tiles, i]`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.rules.adjoints.forms import Form, Independent, added, gram, squares
from propagauss.rules.precision import in_full_precision

TILE, POINTS = 4, 36
BLOCK_ENTRIES = 2**18  # of values at the points, at one time: they should stay in the processor's cache
# products that take as long as what is done to one such value beside the product itself: of a Jacobian, and of `g`
PER_ENTRY, PER_SENSITIVITY = 52, 56

OF_SENSITIVITIES = (
    (1.0, 0.0, 0.0, 0.0),
    (1.0, 1.0, 1.0, 1.0),
    (1.0, -1.0, 1.0, -1.0),
    (1.0, 2.0, 4.0, 8.0),
    (1.0, -2.0, 4.0, -8.0),
    (0.0, 0.0, 0.0, 1.0),
)
OF_INPUTS = (
    (4.0, 0.0, -5.0, 0.0, 1.0, 0.0),
    (0.0, -4.0, -4.0, 1.0, 1.0, 0.0),
    (0.0, 4.0, -4.0, -1.0, 1.0, 0.0),
    (0.0, -2.0, -1.0, 2.0, 1.0, 0.0),
    (0.0, 2.0, -1.0, -2.0, 1.0, 0.0),
    (0.0, 4.0, 0.0, -5.0, 0.0, 1.0),
)
BACK = (
    (1 / 4, -1 / 6, -1 / 6, 1 / 24, 1 / 24, 0.0),
    (0.0, -1 / 6, 1 / 6, 1 / 12, -1 / 12, 0.0),
    (0.0, -1 / 6, -1 / 6, 1 / 6, 1 / 6, 1.0),
)


def tiles_in(height: int, width: int) -> int:
    return -(-height // TILE) * -(-width // TILE)


def tiles_pay(height: int, width: int, channels: int) -> bool:
    """Whether tiles take less time than patches, for a result of this size and so many channels of the input."""
    tiles = tiles_in(height, width)
    return POINTS * (tiles + PER_ENTRY + PER_SENSITIVITY * tiles / channels) < 9 * height * width


class TiledConvolution(Form):
    """The form of a weight `[o, i, 3, 3]`, and of a bias, from `g [K, B, o, H, W]` and the input `x [B, i, ...]`.

    The convolution has stride 1, no dilation and no groups.
    """

    variance: Tensor
    bias: Tensor | None
    of_sensitivities: Tensor
    of_inputs: Tensor
    back: Tensor

    def __init__(self, layer: Independent, full: bool, padding: list[int]):
        super().__init__()
        self.full, self.padding = full, padding
        by_shift = layer.weight.reshape(len(layer.weight), -1, 9).permute(2, 0, 1)  # [9, o, i]
        self.register_buffer("variance", (by_shift.sqrt() if full else by_shift).contiguous())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.sqrt())
        for name, rows in (("of_sensitivities", OF_SENSITIVITIES), ("of_inputs", OF_INPUTS), ("back", BACK)):
            along_one = torch.tensor(rows, dtype=torch.float64)
            self.register_buffer(name, torch.kron(along_one, along_one).to(layer.weight))

    def forward(self, g: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        if self.bias is not None:
            rows = g.sum((3, 4)) * self.bias
            total = added(gram(rows) if self.full else squares(rows), total)
        return added(in_full_precision(self._of_weight, g, x, self.variance), total)

    def _of_weight(self, g: Tensor, x: Tensor, variance: Tensor) -> Tensor:
        inputs = self._inputs(x, g.shape[3], g.shape[4])
        if torch.compiler.is_compiling():  # one product in an exported graph
            return self._of_rows(g, inputs, variance)
        rows = max(1, BLOCK_ENTRIES // (POINTS * g.shape[0] * max(inputs.shape[2:])))
        samples = zip(g.split(1, 1), inputs.split(1, 1), strict=True)
        return torch.cat([self._of_sample(g_part, a_part, variance, rows) for g_part, a_part in samples])

    def _of_sample(self, g: Tensor, inputs: Tensor, variance: Tensor, rows: int) -> Tensor:
        parts = zip(g.split(rows, 2), variance.split(rows, 1), strict=True)
        return torch.stack([self._of_rows(few, inputs, v) for few, v in parts]).sum(0)

    def _inputs(self, x: Tensor, height: int, width: int) -> Tensor:
        """`Q a`: overlapping tiles at the points, `[36, B, tiles, i]`."""
        (down, right), (batch, channels), reach = self.padding, x.shape[:2], TILE + 2
        whole = F.pad(x, (right, right + -width % TILE, down, down + -height % TILE))
        tiles = F.unfold(whole, reach, stride=TILE)
        count = tiles.shape[-1]
        tiles = tiles.reshape(batch, channels, POINTS, count).permute(2, 0, 3, 1)
        return (self.of_inputs @ tiles.flatten(1)).reshape(POINTS, batch, count, channels)

    def _of_rows(self, g: Tensor, inputs: Tensor, variance: Tensor) -> Tensor:
        """For some channels of the result: `g [K, B, o, H, W]`, `variance [9, o, i]`."""
        outputs, batch, results, height, width = g.shape
        channels = inputs.shape[3]
        if height % TILE or width % TILE:
            g = F.pad(g, (0, -width % TILE, 0, -height % TILE))
        down, right = -(-height // TILE), -(-width // TILE)
        tiles = g.reshape(outputs, batch, results, down, TILE, right, TILE).permute(4, 6, 1, 0, 2, 3, 5)
        values = self.of_sensitivities @ tiles.reshape(TILE * TILE, batch * outputs * results * down * right)
        products = values.reshape(POINTS, batch, outputs * results, down * right) @ inputs
        jacobian = self.back @ products.reshape(POINTS, batch * outputs * results * channels)
        if self.full:
            root = jacobian.reshape(9, batch, outputs, results * channels) * variance.reshape(9, 1, 1, -1)
            return (root @ root.mT).sum(0)
        squared = jacobian.square() if jacobian.requires_grad or torch.compiler.is_compiling() else jacobian.square_()
        found = squared.reshape(9, batch * outputs, results * channels) @ variance.reshape(9, -1, 1)
        return found.sum(0).reshape(batch, outputs)
