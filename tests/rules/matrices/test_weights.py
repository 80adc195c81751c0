"""Weights that the model computes or looks up, with variances only: literal sums of squares of the Jacobian."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import propagauss as pg
from propagauss.rules.entries.fixed import copy
from propagauss.rules.entries.scatter import scatter_value_add
from propagauss.rules.facts import facts
from propagauss.rules.matrices.weights import (
    embedding_bag,
    grouped_mm,
    grouped_mm_of_transformers,
    weight_norm_interface,
)
from propagauss.rules.registry import BUILDERS, FUNCTIONS

aten = torch.ops.aten


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squared_jacobian(function: Any, *pairs: tuple[Tensor, Tensor]) -> Tensor:
    """`Σ_i J_ki² v_i` over all arguments, given as (mean, variance)."""
    jacobians = torch.autograd.functional.jacobian(function, tuple(m for m, _ in pairs))
    shape = function(*(m for m, _ in pairs)).shape
    total = torch.zeros(shape.numel(), dtype=torch.float64)
    for j, (_, v) in zip(jacobians, pairs, strict=True):
        total += j.reshape(shape.numel(), -1).square() @ v.flatten()
    return total.reshape(shape)


TABLE, VARIANCE = numbers(5, 3), numbers(5, 3, seed=1).square()
WORDS = torch.tensor([[0, 3, 3, 1], [2, 4, 2, 2]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_bag_of_embeddings_counts_repeated_rows_as_one(mode: str, padding: int | None) -> None:
    model = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding).double().eval()
    model.weight.data = TABLE.clone()
    net = pg.streamline(model, pg.DiagonalPosterior({"weight": VARIANCE}), WORDS)
    g = net(WORDS)
    torch.testing.assert_close(g.mean, model(WORDS), rtol=0, atol=0)
    expected = squared_jacobian(lambda w: F.embedding_bag(WORDS, w, mode=mode, padding_idx=padding), (TABLE, VARIANCE))
    torch.testing.assert_close(g.variance, expected)


def test_weights_of_a_bag_may_be_uncertain() -> None:
    weights, variance = numbers(8, seed=2), numbers(8, seed=3).square() * 1e-10
    offsets = torch.tensor([0, 3, 8])
    words = WORDS.flatten()
    table = pg.Gaussian(TABLE, VARIANCE * 1e-10)
    g = embedding_bag(table, words, offsets, 0, pg.Gaussian(weights, variance), True, None)[0]

    def bag(w: Tensor, c: Tensor) -> Tensor:
        return F.embedding_bag(words, w, offsets, mode="sum", per_sample_weights=c, include_last_offset=True)

    expected = squared_jacobian(bag, (TABLE, VARIANCE * 1e-10), (weights, variance))
    torch.testing.assert_close(g.variance, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("model, shape", [(nn.Linear(3, 2), (4, 3)), (nn.Conv1d(2, 3, 2), (4, 2, 5))])
def test_weight_normalised_layers(model: nn.Module, shape: tuple[int, ...]) -> None:
    """The entries of the normalised weight count as independent: `m² V_w + v_b`, `V_w` by the squared Jacobian."""
    torch.manual_seed(0)
    model = parametrizations.weight_norm(model.double()).eval()
    x = numbers(*shape)
    variances = {n: torch.rand_like(p) * 0.1 for n, p in model.named_parameters()}
    g = pg.streamline(model, pg.DiagonalPosterior(variances), x)(x)
    torch.testing.assert_close(g.mean, model(x))
    length, direction = (f"parametrizations.weight.original{i}" for i in (0, 1))
    parameters = dict(model.named_parameters())
    v_w = squared_jacobian(
        lambda g, v: torch._weight_norm(v, g, 0),
        *((parameters[n].detach(), variances[n]) for n in (length, direction)),
    )
    layer = F.linear if isinstance(model, nn.Linear) else F.conv1d
    torch.testing.assert_close(g.variance, layer(x.square(), v_w, variances["bias"]))


def test_the_norms_that_weight_norm_returns() -> None:
    v, s = numbers(2, 3), numbers(2, 3, seed=1).square()
    norm = weight_norm_interface(pg.Gaussian(v, s), numbers(2, 1))[1]
    expected = squared_jacobian(lambda v: v.norm(dim=1, keepdim=True), (v, s))
    torch.testing.assert_close(norm.variance, expected)


def test_products_with_experts() -> None:
    """Rows of one matrix with one of several weights: `m² V + v (W² + V)`, group by group."""
    m, v = (numbers(6, 4, seed=s).float() for s in (0, 1))
    w, s = (numbers(3, 4, 8, seed=s).float() for s in (2, 3))
    v, s = v.square(), s.square()
    offsets = torch.tensor([1, 3, 6], dtype=torch.int32)
    x, weight = pg.Gaussian(m, v), pg.Gaussian(w, s)
    experts = torch.tensor([0, 1, 1, 2, 2, 2])

    def by_row(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("ni,nio->no", a, b[experts])

    for given, expected in (
        ((x, weight), by_row(m.square(), s) + by_row(v, w.square() + s)),
        ((x, w), by_row(v, w.square())),
        ((m, weight), by_row(m.square(), s)),
    ):
        g = grouped_mm(*given, offsets)
        torch.testing.assert_close(g.mean, aten._grouped_mm(m, w, offsets), rtol=0, atol=0)
        torch.testing.assert_close(g.variance, expected)
        importlib.import_module("transformers.integrations.moe")  # it brings an op of its own for the same thing
        same = grouped_mm_of_transformers(*given, offsets)
        torch.testing.assert_close(same.mean, g.mean)
        torch.testing.assert_close(same.variance, g.variance)
    assert torch.ops.transformers.grouped_mm_fallback.default in BUILDERS


def test_only_shapes_and_types_are_read() -> None:
    """What an op reads of an argument that it takes `at_mean` does not change with its numbers."""
    for op in (aten.zeros_like.default, aten.full_like.default, aten.new_ones.default, aten.expand_as.default):
        assert facts(op).at_mean
    x = pg.Gaussian(numbers(3), numbers(3, seed=1).square())
    other = pg.Gaussian(numbers(2, 3), numbers(2, 3, seed=1).square())
    wide = FUNCTIONS[aten.expand_as.default].function(x, other)
    torch.testing.assert_close(wide.variance, x.variance.expand(2, 3))
    copied = copy(torch.zeros(2, 3, dtype=torch.float32), x)
    assert copied.dtype == torch.float32 and copied.shape == (2, 3)
    torch.testing.assert_close(copied.variance, x.variance.float().expand(2, 3))


def test_a_certain_value_among_uncertain_ones() -> None:
    full = pg.Gaussian.full(numbers(2, 3), torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    assert full.certain(numbers(2, 4)).covariance.shape == (2, 4, 4)
    assert not full.certain(numbers(2, 4)).covariance.any()


def test_scatter_with_a_reduction() -> None:
    index = torch.tensor([[0, 1], [1, 1]])
    x, y = pg.Gaussian(numbers(2, 3), numbers(2, 3, seed=1).square()), numbers(2, 3)
    model = Added().double().eval()
    net = pg.streamline(model, None, (x, pg.Gaussian(y, x.variance)))
    g = net(x, pg.Gaussian(y, x.variance))
    torch.testing.assert_close(g.mean, model(x.mean, y), rtol=0, atol=0)
    torch.testing.assert_close(g.variance, x.variance.scatter_add(1, index, x.variance))
    assert scatter_value_add(x, 1, index, 2.0, "add").variance is x.variance


class Added(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.scatter(1, torch.tensor([[0, 1], [1, 1]]), y, reduce="add")
