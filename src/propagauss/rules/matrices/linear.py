"""Linear layers: `h = W a + b` with random weights, a random input, or both.

With `a` of mean `m` and covariance `C`:  mean `E[W] m + E[b]`,  covariance `E[W] C E[W]ᵀ + noise(m, C)`, where the
posterior answers `noise` (`posterior.base.Noise`). Exact first two moments whenever `a` is independent of `W, b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.gaussian import Gaussian, mean_of
from propagauss.posteriors.base import Noise
from propagauss.posteriors.diagonal import DiagonalNoise
from propagauss.posteriors.kronecker import KroneckerNoise
from propagauss.rules.kernels import Kernels
from propagauss.rules.matrices.linear_kernels import (
    FullLinear,
    Linear,
    Others,
    kronecker_layer,
    linear_fixed_input,
    linear_fixed_weight,
    linear_random_input,
    second_moment,
)
from propagauss.rules.matrices.products import Letters, product, sum_of
from propagauss.rules.precision import in_full_precision
from propagauss.rules.registry import Built, Site, builder, rule

aten = torch.ops.aten

SHARED = "positions that share a weight count as independent"


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
    stored = read_layer(site, weight, bias, flipped)
    if stored is None or len(site.shape(x)) < (2 if site.options.full else 1):
        return None
    random_input, positions = site.is_random(x), site.positions(x)
    note = describe(*stored.names, random_input, "exact moments")
    if any(stored.names) and not site.options.full and positions > 1:
        note += f"; {SHARED}"
    layer = PlacedLayer(stored, x, random_input, positions, site.wanted_outputs, note)
    return KERNELS.of(site.options.covariance, type(stored.noise), layer)


@dataclass(frozen=True)
class PlacedLayer:
    """A stored layer and what is known of the place where it is used."""

    stored: StoredLayer
    x: Any  # the argument that is its input
    random_input: bool
    positions: int  # of one sample that share the layer
    wanted_outputs: tuple[int, int] | None  # the only ones whose variance is used, if not all
    note: str

    @property
    def means(self) -> tuple[Any, Tensor, Tensor | None]:
        """What all kernels take first."""
        return self.x, self.stored.matrix, self.stored.bias


# (covariance structure, kind of noise) -> what to call at run time
KERNELS: Kernels[Built] = Kernels()


@KERNELS.add("diagonal", NoneType)
def _fixed_weight(layer: PlacedLayer) -> Built:
    """`var = v (W²)ᵀ`"""
    part, others, note = _wanted(layer)
    squared = layer.stored.matrix[part].square()
    return Built(linear_fixed_weight, (*layer.means, squared, others), note)


@KERNELS.add("diagonal", DiagonalNoise)
def _independent_weights(layer: PlacedLayer) -> Built | None:
    """`var = m² Vᵀ + v_b`, and `v (W² + V)ᵀ` on a random input; not for a layer with a random bias alone."""
    noise = layer.stored.noise
    assert isinstance(noise, DiagonalNoise)
    if noise.weight is None:
        return None
    part, others, note = _wanted(layer)
    variances = (noise.weight[part], None if noise.bias is None else noise.bias[part])
    if not layer.random_input:
        return Built(linear_fixed_input, (*layer.means, *variances, others), note)
    second_t = second_moment(layer.stored.matrix, noise)[part].t()
    return Built(linear_random_input, (*layer.means, *variances, second_t, others), note)


@KERNELS.add("diagonal", Noise)
def _any_variances(layer: PlacedLayer) -> Built:
    """`var = noise(m) + v (W² + V)ᵀ`"""
    stored = layer.stored
    assert stored.noise is not None
    return Built(Linear(stored.matrix, stored.bias, stored.noise, layer.random_input), (layer.x,), layer.note)


@KERNELS.add("full", KroneckerNoise)
def _kronecker_covariance(layer: PlacedLayer) -> Built | None:
    """`C' = W C Wᵀ + Σ_k c_k M_k + Cov(b)`, for one position per sample and a random weight."""
    noise = layer.stored.noise
    assert isinstance(noise, KroneckerNoise)
    if not noise.has_weight or layer.positions > 1:
        return None
    ready = noise.for_covariance(layer.random_input)
    assert isinstance(ready, KroneckerNoise)
    return Built(kronecker_layer, (*layer.means, *ready.constants()), layer.note)


@KERNELS.add("full", NoneType, Noise)
def _any_covariance(layer: PlacedLayer) -> Built:
    """`C' = W C Wᵀ + noise(m, C)`"""
    stored = layer.stored
    noise = None if stored.noise is None else stored.noise.for_covariance(layer.random_input)
    return Built(FullLinear(stored.matrix, stored.bias, noise, layer.positions), (layer.x,), layer.note)


def _wanted(layer: PlacedLayer) -> tuple[slice, Others, str]:
    """The outputs whose variance is wanted, how many there are before and after them, and what the plan says."""
    if layer.wanted_outputs is None:
        return slice(None), None, layer.note
    part = slice(*layer.wanted_outputs)
    note = f"{layer.note}; variance of outputs {part.start} to {part.stop - 1} only, the others fixed at their means"
    return part, (part.start, len(layer.stored.matrix) - part.stop), note


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
    if all(x.mean.dim() == 3 and x.samples == mean.shape[0] for x in (a, b)):
        each = (a.mean, a.covariance, b.mean, b.covariance)
        return Gaussian.full(mean, in_full_precision(_covariance_of_product, *each))
    return product([a, b], *_matmul_letters(a.mean.dim(), b.mean.dim()), mean)


def _covariance_of_product(a: Tensor, c_a: Tensor, b: Tensor, c_b: Tensor) -> Tensor:
    """`m_a m_aᵀ C_b + C_a m_b m_bᵀ + C_a C_b` over both inner letters, of one matrix `[I, K]` and `[K, J]` per sample.

    As `product` has it, in matrix products: those with means need no copies of a covariance.
    """
    (batch, i, k), j = a.shape, b.shape[2]
    n = i * j
    first = b.mT.unsqueeze(1) @ (c_a.reshape(batch, i * k * i, k) @ b).reshape(batch, i, k, n)
    second = a.unsqueeze(1) @ (a @ c_b.reshape(batch, k, j * k * j)).reshape(batch, n, k, j)
    pairs_a = c_a.reshape(batch, i, k, i, k).transpose(2, 3).reshape(batch, i * i, k * k)
    pairs_b = c_b.reshape(batch, k, j, k, j).transpose(2, 3).reshape(batch, k * k, j * j)
    both = (pairs_a @ pairs_b).reshape(batch, i, i, j, j).transpose(2, 3).reshape(batch, n, n)
    return first.reshape(batch, n, n) + second.reshape(batch, n, n) + both


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
