"""What a random weight adds to the covariance of the outputs where the positions of a sample share it.

Given sensitivities `g_t [K, B, o, T]` of the results and the inputs `a_t [B, i, T]` of all positions `t`, the Jacobian
of the weight is `M_k = Σ_t g_kt a_tᵀ`. In a basis in which the entries of the weight are independent with variances
`V`:

    Σ_oi V_oi M_k,oi M_l,oi = Σ_ts Σ_o g_kto g_lso A_tso,    A_tso = Σ_i V_oi a_ti a_si

The first form makes `M`, some samples or rows at a time so that it stays in the processor's cache; the second never
does, and takes fewer products where positions are fewer than about twice the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.rules.adjoints.forms import Form, Independent, added, gram, squares, weighted

BLOCK_ENTRIES = 2**19  # of a Jacobian, at one time
LONG_PRODUCTS = 2**15  # entries of all inputs
PASS = 16  # products that take as long as reading and writing one entry of a Jacobian


@dataclass(frozen=True)
class Sizes:
    """How many outputs (K), positions (None if open), and entries of a layer's result and input there are."""

    outputs: int
    positions: int | None
    results: int
    inputs: int

    def by_pairs(self, full: bool) -> bool:
        """Whether pairs of positions take fewer products than the Jacobian."""
        if self.positions is None:
            return False
        k, t = self.outputs, self.positions
        jacobian = k * t + PASS * k + (k * k if full else 0)
        return t * (t + 1) // 2 + 2 * k * t * t / self.inputs < jacobian

    def rotates_first(self) -> bool:
        """Whether it is cheaper to rotate sensitivities and inputs than the Jacobian that they make."""
        k, o, i = self.outputs, self.results, self.inputs
        return self.positions is not None and self.positions * (k * o * o + i * i) <= k * o * i * (o + i)


class SharedLayer(Form):
    """The form of a weight and, if it is given, of a bias, from `g [K, B, o, T]` and `a [B, i, T]`."""

    variance: Tensor
    bias: Tensor | None
    left: Tensor | None
    right: Tensor | None
    first: Tensor
    second: Tensor
    numbers: Tensor

    def __init__(self, layer: Independent, full: bool, pairs: int = 0):
        """`pairs`: the number of positions, if the form goes by pairs of them."""
        super().__init__()
        self.full, self.pairs = full, bool(pairs)
        for name, value in zip(("first", "second", "numbers"), numbered_pairs(pairs, layer.weight.device), strict=True):
            self.register_buffer(name, value if pairs else None)
        left, right = (None, None) if layer.basis is None else layer.basis
        # the form by Jacobians reads roots where it needs their products
        variance = layer.weight.sqrt() if full and not pairs else layer.weight
        self.register_buffer("variance", variance.clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.sqrt())
        self.register_buffer("left", None if left is None else left.mT.contiguous())
        self.register_buffer("right", None if right is None else right.mT.contiguous())

    def forward(self, g: Tensor, a: Tensor, total: Tensor | None = None) -> Tensor:
        if self.left is not None and self.right is not None:
            g, a = _rotated(self.left, g), _rotated(self.right, a)
        if self.bias is not None:
            rows = g.sum(-1) * self.bias
            total = added(gram(rows) if self.full else squares(rows), total)
        if not self.pairs:
            return added(_by_jacobian(g, a, self.variance, self.full), total)
        pairs = F.linear(_products(a.mT, self.first, self.second), self.variance)
        return added(over_pairs(g, pairs, self.numbers, self.full), total)

    @property
    def independent(self) -> Independent:
        """The layer that it was made from, in the basis of the form."""
        is_root = self.full and not self.pairs
        bias = None if self.bias is None else self.bias.square()
        return Independent(self.variance.square() if is_root else self.variance, bias, None)


class AveragedLayer(Form):
    """The same from `r [K, B, o]` and `m [B, o, T]`, where `g = r m`: one Jacobian `N = m aᵀ` serves all outputs."""

    variance: Tensor
    bias: Tensor | None

    def __init__(self, layer: SharedLayer):
        super().__init__()
        self.full, own = layer.full, layer.independent
        self.register_buffer("variance", own.weight)
        self.register_buffer("bias", own.bias)

    def forward(self, r: Tensor, m: Tensor, a: Tensor, total: Tensor | None = None) -> Tensor:
        noise = _noise(m, a, self.variance)
        if self.bias is not None:
            noise = noise + m.sum(-1).square() * self.bias
        return weighted(r, noise, self.full, total)


def _noise(m: Tensor, a: Tensor, variance: Tensor) -> Tensor:
    """`Σ_i V_oi N_oi² [B, o]`"""
    if torch.compiler.is_compiling() or m.requires_grad or a.requires_grad:
        return ((m @ a.mT).square() * variance).sum(-1)
    rows = max(1, BLOCK_ENTRIES // max(1, 4 * a.shape[0] * a.shape[1]))
    parts = zip(m.split(rows, 1), variance.split(rows), strict=True)
    return torch.cat([(few @ a.mT).square_().mul_(v).sum(-1) for few, v in parts], 1)


def _rotated(matrix: Tensor, t: Tensor) -> Tensor:
    """`matrix @ t`, as one product where positions are rows in memory, as they are of tokens."""
    return F.linear(t.mT, matrix).mT if t.mT.is_contiguous() else matrix @ t


def _by_jacobian(g: Tensor, a: Tensor, variance: Tensor, full: bool) -> Tensor:
    """`variance` holds variances, or standard deviations if the whole covariance is wanted."""
    outputs, batch, results, _ = g.shape
    if torch.compiler.is_compiling():  # one product in an exported graph
        return _of_rows(g, a, variance, full)
    column = outputs * a.shape[1]
    samples = min(batch, max(1, BLOCK_ENTRIES // max(1, column * results)))
    rows = max(1, BLOCK_ENTRIES // max(1, column * samples))
    parts: list[Tensor] = []
    for g_part, a_part in zip(g.split(samples, 1), a.split(samples), strict=True):
        total: Tensor | None = None
        for few, v in zip(g_part.split(rows, 2), variance.split(rows), strict=True):
            total = _of_rows(few, a_part, v, full, total)
        assert total is not None
        parts.append(total)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _of_rows(g: Tensor, a: Tensor, variance: Tensor, full: bool, total: Tensor | None = None) -> Tensor:
    outputs, batch, _, positions = g.shape
    jacobian = g.transpose(0, 1).reshape(batch, -1, positions) @ a.mT  # [B, K o, i]
    if full:
        root = (jacobian.reshape(batch, outputs, *variance.shape) * variance).reshape(batch, outputs, -1)
        return root @ root.mT if total is None else torch.baddbmm(total, root, root.mT)
    # in place, so that the block stays in the cache; a derivative needs it as it is
    squared = jacobian.square() if jacobian.requires_grad or torch.compiler.is_compiling() else jacobian.square_()
    return added((squared.reshape(batch * outputs, -1) @ variance.reshape(-1)).reshape(batch, outputs), total)


def numbered_pairs(positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs `t <= s` of positions, and the number of each pair in a table of them all."""
    first, second = torch.triu_indices(positions, positions, device=device)
    numbers = torch.zeros(positions, positions, dtype=torch.long, device=device)
    count = torch.arange(len(first), device=device)
    return first, second, numbers.index_put((first, second), count).index_put((second, first), count)


def over_pairs(g: Tensor, pairs: Tensor, numbers: Tensor, full: bool) -> Tensor:
    """`Σ_ts Σ_o g_kto g_lso A_tso` from `A [B, pairs, o]`, by the numbers `[T, T]` of its pairs."""
    # several times as fast as `pairs[:, numbers]`
    between = pairs.index_select(1, numbers.flatten()).unflatten(1, numbers.shape).permute(0, 3, 1, 2)  # [B, o, T, T]
    rows = g.permute(1, 2, 0, 3)  # [B, o, K, T]
    moved = rows @ between
    if not full:
        return (moved * rows).sum((1, 3))
    return moved.transpose(1, 2).flatten(2) @ rows.transpose(1, 2).flatten(2).mT


def _products(inputs: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Products of the inputs `[B, T, i]` at all pairs of positions; long ones are not copied first."""
    batch, positions, length = inputs.shape
    if torch.compiler.is_compiling() or batch * positions * length < LONG_PRODUCTS:
        return inputs.index_select(1, first) * inputs.index_select(1, second)
    inputs = inputs.contiguous()
    return torch.cat([inputs[:, t:] * inputs[:, t : t + 1] for t in range(positions)], 1)


def shared_form(layer: Independent, full: bool, sizes: Sizes) -> Form | None:
    """The form of a layer with several positions a sample; None where its Jacobian as a whole is cheaper."""
    if layer.basis is not None and not sizes.rotates_first():
        return None
    return SharedLayer(layer, full, sizes.positions or 0 if sizes.by_pairs(full) else 0)
