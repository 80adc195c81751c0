"""Weights that are computed or looked up: weight normalisation, bags of embeddings, products with expert weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.elementwise.arithmetic import independent_sum, stretched
from propagauss.rules.matrices.products import Value
from propagauss.rules.precision import in_full_precision, widened
from propagauss.rules.registry import Built, Site, builder, named, rule
from propagauss.rules.statistics.reductions import reduced

aten = torch.ops.aten

# -- weight normalisation


@rule(aten._weight_norm.default, note="linearised in direction and length, both independent")
def weight_norm(v: Value, g: Value, dim: int = 0) -> Gaussian:
    """`w = g u`, `u = v / ‖v‖` over all dimensions but `dim`: `J_v = (g / ‖v‖) (I - u uᵀ)`, `J_g = u`.

    `Σ_i (J_v)_ki² s_i = (g / ‖v‖)² ((1 - 2 u_k²) s_k + u_k² Σ_i u_i² s_i)` for variances `s` of v.
    """
    return _weight_norm(v, g, dim)[0]


@rule(aten._weight_norm_interface.default, note="linearised in direction and length, both independent")
def weight_norm_interface(v: Value, g: Value, dim: int = 0) -> tuple[Gaussian, Any]:
    return _weight_norm(v, g, dim)


def _weight_norm(v: Value, g: Value, dim: int) -> tuple[Gaussian, Any]:
    m, length = mean_of(v), mean_of(g)
    mean = aten._weight_norm(m, length, dim)
    dims = [d for d in range(m.dim()) if dim != -1 and d != dim % m.dim()] or list(range(m.dim()))
    size = torch.linalg.vector_norm(m, 2, dims, True)
    unit = m / size
    parts: list[Gaussian] = []
    norm: Any = size
    if isinstance(v, Gaussian):
        gain = length / size
        parts.append(
            v.mapped(
                mean,
                lambda t: gain * (t - unit * (unit * t).sum(dims, True)),
                lambda s: gain.square() * _projected(s, unit.square(), dims),
            )
        )
        norm = reduced(v, size, unit, dims, True)
    if isinstance(g, Gaussian):
        parts.append(stretched(g, mean.shape).scaled(mean, unit))
    return independent_sum(mean, parts), norm


def _projected(s: Tensor, square: Tensor, dims: list[int]) -> Tensor:
    return ((1 - 2 * square) * s + square * (square * s).sum(dims, True)).clamp(min=0)


# -- bags of embeddings


@builder(
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
)
def build_embedding_bag(site: Site) -> Built | None:
    """Variances only: how a bag of rows of a random table depends on the table is left to the general rule."""
    if site.options.full:
        return None
    given = named(site)
    names = ("weight", "indices", "offsets", "mode", "per_sample_weights", "include_last_offset")
    inputs = (*(given[name] for name in names), given.get("padding_idx"))
    note = "routed by the largest mean" if given["mode"] == 2 else "exact; table and weights taken as independent"
    return Built(embedding_bag, inputs, note)


def embedding_bag(
    weight: Value,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    per_sample: Value | None,
    include_last: bool,
    padding: int | None,
) -> tuple[Any, ...]:
    """`y_b = Σ_i c_i W[k_i]` over a bag: `var_b = Σ_k (Σ_{i: k_i = k} c_i)² V[k]`, a row met twice being the same one.

    With uncertain `c`, `Σ_i s_i (W² + V)[k_i]` more, `s` their variances.
    """
    table = mean_of(weight)
    plain = None if per_sample is None else mean_of(per_sample)
    settings: tuple[Any, ...] = (False, mode, False, plain, include_last, padding)
    result, *rest = aten.embedding_bag.padding_idx(table, indices, offsets, *settings)
    if mode == 2:
        assert isinstance(weight, Gaussian)
        return weight.mapped(result, lambda t: t.gather(0, rest[2])), *rest
    flat = indices.flatten()
    bag = torch.bucketize(torch.arange(flat.shape[0], device=flat.device), offsets, right=True) - 1
    coefficient = torch.ones_like(flat, dtype=table.dtype) if plain is None else plain.flatten()
    counted = torch.ones_like(coefficient)
    if padding is not None and padding >= 0:
        counted = (flat != padding).to(table.dtype)
    if mode == 1:
        total = counted.new_zeros(result.shape[0]).index_add(0, bag, counted)
        coefficient = coefficient / total.clamp(min=1)[bag]
    coefficient = coefficient * counted
    variance = torch.zeros_like(result)
    if isinstance(weight, Gaussian):
        met = (flat.unsqueeze(0) == flat.unsqueeze(1)) & (bag.unsqueeze(0) == bag.unsqueeze(1))
        together = coefficient * (met.to(table.dtype) @ coefficient)
        variance = variance.index_add(0, bag, together.unsqueeze(-1) * weight.variance[flat])
    if isinstance(per_sample, Gaussian):
        second = table.square() + weight.variance if isinstance(weight, Gaussian) else table.square()
        own = (per_sample.variance.flatten() * counted).unsqueeze(-1)
        variance = variance.index_add(0, bag, own * second[flat])
    return Gaussian.diagonal(result, variance), *rest


# -- experts


@builder(aten._grouped_mm.default)
def build_grouped_mm(site: Site) -> Built | None:
    """Rows of one matrix meet one of several others. Which rows make a sample is not known: variances only."""
    if site.options.full:
        return None
    given = named(site)
    return Built(grouped_mm, tuple(given[name] for name in ("self", "mat2", "offs", "bias", "out_dtype")), _EXPERTS)


@builder("transformers::grouped_mm_fallback")
def build_grouped_mm_of_transformers(site: Site) -> Built | None:
    if site.options.full:
        return None
    given = named(site)
    return Built(grouped_mm_of_transformers, tuple(given[name] for name in ("input", "weight", "offs")), _EXPERTS)


_EXPERTS = "factors taken as independent: exact moments; rows are sent to experts by their means"


def grouped_mm(
    x: Value, weight: Value, offs: Tensor | None = None, bias: Value | None = None, out_dtype: Any = None
) -> Gaussian:
    """`var = m² V + v (W² + V) + v_b`, group by group."""
    mean = aten._grouped_mm(mean_of(x), mean_of(weight), offs, None if bias is None else mean_of(bias), out_dtype)
    variance = _grouped_variance(lambda a, b: aten._grouped_mm(a, b, offs), x, weight)
    variance = variance + bias.variance if isinstance(bias, Gaussian) else variance
    return Gaussian.diagonal(mean, variance.to(mean.dtype))


def grouped_mm_of_transformers(x: Value, weight: Value, offs: Tensor) -> Gaussian:
    """The same with the op that Hugging Face's library falls back to where a model is exported."""
    op = torch.ops.transformers.grouped_mm_fallback
    mean = op(mean_of(x), mean_of(weight), offs)
    return Gaussian.diagonal(mean, _grouped_variance(lambda a, b: op(a, b, offs), x, weight).to(mean.dtype))


def _grouped_variance(product: Callable[[Tensor, Tensor], Tensor], x: Value, weight: Value) -> Tensor:
    m, w = (widened(mean_of(value)) for value in (x, weight))  # squares need more than half precision
    terms = []
    if isinstance(weight, Gaussian):
        terms.append(in_full_precision(product, m.square(), widened(weight.variance)))
    if isinstance(x, Gaussian):
        second = w.square() + widened(weight.variance) if isinstance(weight, Gaussian) else w.square()
        terms.append(in_full_precision(product, widened(x.variance), second))
    return torch.stack(terms).sum(0) if terms else torch.zeros_like(product(m, w))
