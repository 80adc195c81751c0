"""Linear layers: `h = W a + b` with random weights, a random input, or both.

With `a` of mean `m` and covariance `C`:  mean `E[W] m + E[b]`,  covariance `E[W] C E[W]ᵀ + noise(m, C)`, where the
posterior answers `noise` (`posterior.base.Noise`). Exact first two moments whenever `a` is independent of `W, b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.gaussian import Gaussian, mean_of
from propagauss.posteriors.base import Noise
from propagauss.posteriors.diagonal import DiagonalNoise
from propagauss.posteriors.kronecker import KroneckerNoise, probe
from propagauss.rules.matrices.precision import in_full_precision
from propagauss.rules.matrices.products import Letters, product, sum_of
from propagauss.rules.registry import Built, Site, builder, rule

aten = torch.ops.aten

SHARED = "positions that share a weight count as independent"

# In the next three functions, `others` counts the outputs before and after those whose spread is wanted: matrices of
# spreads have no rows for them, and their variance is given as 0, for nobody to read.
Others = tuple[int, int] | None


def linear_fixed_input(
    x: Tensor, weight: Tensor, bias: Tensor | None, spread: Tensor, bias_spread: Tensor | None, others: Others = None
) -> Gaussian:
    """Independent weights, fixed input: `var = m² Vᵀ + v_b`. Two products of the size of the layer's own."""
    own = in_full_precision(_own, x, spread, bias_spread)
    return Gaussian.diagonal(F.linear(x, weight, bias), beside(own, others))


def linear_random_input(
    x: Gaussian,
    weight: Tensor,
    bias: Tensor | None,
    spread: Tensor,
    bias_spread: Tensor | None,
    second_t: Tensor,
    others: Others = None,
) -> Gaussian:
    """Independent weights, random input: `var = m² Vᵀ + v_b + v (W² + V)ᵀ`, the second matrix precomputed."""
    m = x.mean
    both = in_full_precision(_own_and_carried, m, x.variance, spread, bias_spread, second_t)
    return Gaussian.diagonal(F.linear(m, weight, bias), beside(both, others))


def linear_fixed_weight(
    x: Gaussian, weight: Tensor, bias: Tensor | None, squared: Tensor, others: Others = None
) -> Gaussian:
    """Fixed weights, random input: `var = v (W²)ᵀ`."""
    carried = in_full_precision(F.linear, x.variance, squared)
    return Gaussian.diagonal(F.linear(x.mean, weight, bias), beside(carried, others))


def _own(m: Tensor, spread: Tensor, bias_spread: Tensor | None) -> Tensor:
    return F.linear(m * m, spread, bias_spread)


def _own_and_carried(m: Tensor, v: Tensor, spread: Tensor, bias_spread: Tensor | None, second_t: Tensor) -> Tensor:
    return _accumulate(F.linear(m * m, spread, bias_spread), v, second_t)


def beside(variance: Tensor, others: Others) -> Tensor:
    """With zeros for the outputs whose spread nobody wants."""
    return variance if others is None else F.pad(variance, others)


class Linear(nn.Module):
    """Any posterior, variances only: `var = noise(m) + v (W² + V)ᵀ` with `V` the marginal variances of the weight."""

    weight: Tensor
    bias: Tensor | None
    second_t: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, noise: Noise, random_input: bool):
        super().__init__()
        self.register_buffer("weight", weight)  # [out, in]
        self.register_buffer("bias", bias)
        self.register_buffer("second_t", second_moment(weight, noise).t() if random_input else None)
        self.noise = noise

    def forward(self, x: Gaussian | Tensor) -> Gaussian:
        m = x if isinstance(x, Tensor) else x.mean
        spread = in_full_precision(self.noise.variance, m)
        if isinstance(x, Gaussian):
            assert self.second_t is not None
            spread = in_full_precision(_accumulate, spread, x.variance, self.second_t)
        return Gaussian.diagonal(F.linear(m, self.weight, self.bias), spread)


class FullLinear(nn.Module):
    """Full: `C' = W C Wᵀ + noise(m, C)`, joint over all positions that share the weight."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, noise: Noise | None, positions: int):
        super().__init__()
        self.register_buffer("weight", weight)  # [out, in]
        self.register_buffer("bias", bias)
        self.noise = noise
        self.positions = positions

    def forward(self, x: Gaussian | Tensor) -> Gaussian:
        m = x if isinstance(x, Tensor) else x.mean
        mean = F.linear(m, self.weight, self.bias)
        c = None if isinstance(x, Tensor) else x.covariance
        if self.positions == 1:
            spread = in_full_precision(self._one, m.reshape(-1, m.shape[-1]), c)
        else:
            spread = in_full_precision(self._several, m, c)
        return Gaussian.full(mean, spread)

    def _one(self, m: Tensor, c: Tensor | None) -> Tensor:
        """`m: [B, in]`, `c: [B, in, in]` -> `[B, out, out]`"""
        noise = None if self.noise is None else self.noise.covariance(m, m, c)
        if c is None or noise is None:
            return self._carried(c, noise)
        weight = self.weight
        return torch.baddbmm(noise, weight.expand(c.shape[0], -1, -1), F.linear(c, weight))

    def _several(self, m: Tensor, c: Tensor | None) -> Tensor:
        """Positions in rows and columns: `m: [B, T, in]`, `c: [B, T * in, T * in]` -> `[B, T * out, T * out]`"""
        (out, inputs), t = self.weight.shape, self.positions
        m = m.reshape(-1, t, inputs)
        blocks = None if c is None else c.reshape(-1, t, inputs, t, inputs).transpose(2, 3)  # [B, T, T, in, in]
        noise = None if self.noise is None else self.noise.covariance(m.unsqueeze(2), m.unsqueeze(1), blocks)
        return self._carried(blocks, noise).transpose(2, 3).reshape(-1, t * out, t * out)

    def _carried(self, c: Tensor | None, noise: Tensor | None) -> Tensor:
        """`W c Wᵀ + noise`"""
        if c is None:
            assert noise is not None
            return noise
        carried = self.weight @ (c @ self.weight.mT)
        return carried if noise is None else carried + noise


def kronecker_layer(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rotation: Tensor,
    right: Tensor,
    patterns: Tensor,
    bias_noise: Tensor | None,
    probes: Tensor | None,
) -> Gaussian:
    """`FullLinear` with a `KroneckerNoise` (see there for the formula), for one position per sample, in few calls."""
    m = x if isinstance(x, Tensor) else x.mean
    rows = m if m.dim() == 2 else m.reshape(-1, m.shape[-1])
    c = None if isinstance(x, Tensor) else x.covariance
    noise = in_full_precision(_kronecker, rows, c, weight, rotation, right, patterns, bias_noise, probes)
    return Gaussian.full(F.linear(m, weight, bias), noise)


def _kronecker(
    rows: Tensor,
    c: Tensor | None,
    weight: Tensor,
    rotation: Tensor,
    right: Tensor,
    patterns: Tensor,
    bias_noise: Tensor | None,
    probes: Tensor | None,
) -> Tensor:
    coefficients = (rows @ rotation).square() @ right
    if c is not None:
        coefficients = coefficients + probe(c, probes, rotation, right)
    out = weight.shape[0]
    noise = coefficients @ patterns if bias_noise is None else torch.addmm(bias_noise, coefficients, patterns)
    noise = noise.view(-1, out, out)
    if c is not None:
        noise = torch.baddbmm(noise, weight.expand(c.shape[0], -1, -1), F.linear(c, weight))
    return noise


def second_moment(weight: Tensor, noise: Noise | None) -> Tensor:
    """`E[W²]`, entry by entry."""
    spread = None if noise is None else noise.weight_variance()
    return weight.square() if spread is None else weight.square() + spread


def _accumulate(start: Tensor, v: Tensor, matrix_t: Tensor) -> Tensor:
    """`start + v @ matrix_t`, as one accumulating product where the shapes allow it."""
    return torch.addmm(start, v, matrix_t) if v.dim() == 2 else start + v @ matrix_t


@builder(aten.linear.default, linear_in=(0, 1), adds=2, reads_weight=True)
def build_linear(site: Site) -> Built | None:
    x, weight, *rest = site.args
    return linear_layer(site, x, weight, rest[0] if rest else None, flipped=False)


@builder(aten.addmm.default, reads_weight=True)
def build_addmm(site: Site) -> Built | None:
    if site.kwargs.get("beta", 1) != 1 or site.kwargs.get("alpha", 1) != 1:
        return None
    bias, x, weight = site.args
    return linear_layer(site, x, weight, bias, flipped=True)


@builder(aten.mm.default, aten.matmul.default, reads_weight=True)
def build_matmul(site: Site) -> Built | None:
    x, weight = site.args
    return linear_layer(site, x, weight, None, flipped=True)


@dataclass(frozen=True)
class StoredLayer:
    """A linear layer that is known when the model is streamlined."""

    matrix: Tensor  # [out, in]
    bias: Tensor | None
    noise: Noise | None  # if any of the two is random
    names: tuple[str | None, str | None]  # of the random ones


def read_layer(site: Site, weight: Any, bias: Any, flipped: bool) -> StoredLayer | None:
    """A layer with a stored weight; `flipped` if the op multiplies by `weight` rather than by its transpose."""
    w = site.weight(weight)
    b = None if bias is None else site.weight(bias)
    if w is None or w.tensor.dim() != 2 or (bias is not None and (b is None or b.tensor.dim() != 1)):
        return None
    names = (w.name, b and b.name)
    noise = None
    if any(names):
        assert site.posterior is not None
        noise = site.posterior.noise(*names, transposed=w.transposed != flipped)
    # copies: the network must not change when the model is trained on
    matrix = (w.tensor.t() if flipped else w.tensor).clone(memory_format=torch.contiguous_format)
    return StoredLayer(matrix, None if b is None else b.tensor.clone(), noise, names)


def linear_layer(site: Site, x: Any, weight: Any, bias: Any, flipped: bool) -> Built | None:
    """The rule for a layer with a stored weight."""
    layer = read_layer(site, weight, bias, flipped)
    if layer is None or len(site.shape(x)) < (2 if site.options.full else 1):
        return None
    matrix, offset, noise = layer.matrix, layer.bias, layer.noise
    note = describe(*layer.names, site.is_random(x), "exact moments")
    if any(layer.names) and not site.options.full and site.positions(x) > 1:
        note += f"; {SHARED}"
    if site.options.full:
        if noise is not None:
            noise = noise.for_covariance(site.is_random(x))
        if isinstance(noise, KroneckerNoise) and noise.has_weight and site.positions(x) == 1:
            return Built(kronecker_layer, (x, matrix, offset, *noise.constants()), note)
        return Built(FullLinear(matrix, offset, noise, site.positions(x)), (x,), note)
    if noise is not None and (not isinstance(noise, DiagonalNoise) or noise.weight is None):
        return Built(Linear(matrix, offset, noise, site.is_random(x)), (x,), note)
    part, others = slice(None), None
    if site.wanted_outputs is not None:
        part = slice(*site.wanted_outputs)
        others = (part.start, len(matrix) - part.stop)
        note += f"; spread of outputs {part.start} to {part.stop - 1} only, the others enter by their mean"
    if noise is None:
        return Built(linear_fixed_weight, (x, matrix, offset, matrix[part].square(), others), note)
    assert noise.weight is not None
    spreads = (noise.weight[part], None if noise.bias is None else noise.bias[part])
    if not site.is_random(x):
        return Built(linear_fixed_input, (x, matrix, offset, *spreads, others), note)
    second_t = second_moment(matrix, noise)[part].t()
    return Built(linear_random_input, (x, matrix, offset, *spreads, second_t, others), note)


def describe(weight: str | None, bias: str | None, random_input: bool, kept: str) -> str:
    """A word for the plan on a layer: which of its parameters are random, what it is applied to, what is kept."""
    random = " and ".join(n for n, on in (("weight", weight), ("bias", bias)) if on) or "fixed"
    return f"{random} {'on a random input' if random_input else 'on a fixed input'}: {kept}"


@rule(
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    note="factors taken as independent: exact moments",
    linear_in=(0, 1),
)
def matmul(a: Gaussian | Tensor, b: Gaussian | Tensor) -> Gaussian:
    """`var(ab) = m_a² v_b + v_a m_b² + v_a v_b` with matrix products; the plain matrix product if one side is fixed."""
    if isinstance(b, Tensor):
        assert isinstance(a, Gaussian)
        return a.mapped(a.mean @ b, lambda t: t @ b, lambda t: in_full_precision(_times_square, t, b))
    if isinstance(a, Tensor):
        return b.mapped(a @ b.mean, lambda t: a @ t, lambda t: in_full_precision(_square_times, a, t))
    mean = a.mean @ b.mean
    if not a.is_full and not b.is_full:
        return Gaussian.diagonal(mean, a.mean.square() @ b.variance + a.variance @ (b.mean.square() + b.variance))
    return product([a, b], *_matmul_letters(a.mean.dim(), b.mean.dim()), mean)


def _times_square(v: Tensor, b: Tensor) -> Tensor:
    return v @ b.square()


def _square_times(a: Tensor, v: Tensor) -> Tensor:
    return a.square() @ v


def _matmul_letters(left: int, right: int) -> tuple[list[Letters], Letters]:
    """`...ik, ...kj -> ...ij` for factors with so many dimensions; `...` are negative numbers up to -1."""
    i, k, j = [0] if left > 1 else [], [1], [2] if right > 1 else []
    dots = [list(range(2 - max(dims, 2), 0)) for dims in (left, right, max(left, right))]
    return [dots[0] + i + k, dots[1] + k + j], dots[2] + i + j


@rule(aten.linear.default, note="a computed weight, independent of the input: exact moments")
def linear(x: Gaussian | Tensor, weight: Gaussian | Tensor, bias: Gaussian | Tensor | None = None) -> Gaussian:
    """`var = m² Vᵀ + v (W² + V)ᵀ + v_b`, for a weight that the model computes; stored ones have builders."""
    mean = F.linear(mean_of(x), mean_of(weight), None if bias is None else mean_of(bias))
    parts = []
    if isinstance(x, Gaussian) or isinstance(weight, Gaussian):
        turned = weight.t() if isinstance(weight, Tensor) else weight.mapped(weight.mean.t(), lambda t: t.t())
        parts.append(matmul(x, turned))
    if isinstance(bias, Gaussian):
        parts.append(bias)
    return sum_of(mean, parts)
