"""`variance_tolerance`: low-rank variances of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from both_files import both_files
from propagauss.passes.low_rank_variances import deviation
from propagauss.rules.images.convolution_kernels import (
    convolution_fixed_weight,
    convolution_independent,
    convolution_low_rank,
)
from propagauss.rules.matrices.linear_kernels import (
    linear_fixed_input,
    linear_fixed_weight,
    linear_low_rank,
    linear_random_input,
)
from propagauss.rules.matrices.low_rank import factorise

SETTINGS = ((), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # of a 3 x 3 convolution that keeps the size


def mlp(width: int = 96) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5)
    ).eval()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * 9, 6),
    ).eval()


class Attention(nn.Module):
    """With queries, keys and values from one projection."""

    def __init__(self, width: int = 48):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(width, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


CASES: list[Any] = [
    pytest.param(mlp, (32, 64), id="MLP"),
    pytest.param(cnn, (16, 3, 8, 8), id="CNN"),
    pytest.param(Attention, (8, 6, 48), id="fused projection"),
]


def posterior(model: nn.Module, *patterns: str) -> pg.Posterior:
    """Variances of a tenth of the size of a weight, different for every weight."""
    variances = {n: 0.01 * p.detach().square().mean() * (0.5 + torch.rand_like(p)) for n, p in model.named_parameters()}
    found = pg.DiagonalPosterior(variances)
    return found.select(*patterns) if patterns else found


# -- factors


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_factors_are_not_negative_and_keep_sums(rank: int) -> None:
    matrix = torch.randn(30, 50, dtype=torch.float64).square()
    left, right = factorise(matrix, rank)
    assert left.shape == (30, rank) and right.shape == (rank, 50)
    assert (left >= 0).all() and (right >= 0).all()
    torch.testing.assert_close((left @ right).sum(1), matrix.sum(1))
    torch.testing.assert_close((left @ right).sum(0), matrix.sum(0), rtol=1e-2, atol=0)


def test_factors_of_a_matrix_of_that_rank() -> None:
    one = torch.rand(20, 1, dtype=torch.float64) @ torch.rand(1, 30, dtype=torch.float64)
    torch.testing.assert_close(torch.mm(*factorise(one, 1)), one)
    blocks = torch.block_diag(one, one)
    torch.testing.assert_close(torch.mm(*factorise(blocks, 2)), blocks, rtol=1e-3, atol=1e-6)


def test_more_rank_is_closer() -> None:
    matrix = (torch.rand(40, 6) @ torch.rand(6, 60)) ** 2
    errors = [(torch.mm(*factorise(matrix, rank)) - matrix).norm() for rank in (1, 2, 4, 8)]
    assert errors == sorted(errors, reverse=True)


def test_factors_of_zeros_and_of_empty_rows() -> None:
    matrix = torch.rand(10, 12)
    matrix[3], matrix[:, 5] = 0.0, 0.0
    for m in (matrix, torch.zeros(4, 5)):
        for rank in (1, 2):
            product = torch.mm(*factorise(m, rank))
            assert product.isfinite().all() and (product >= 0).all()


# -- the rules, where the factors are exact


def outer(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    left, right = torch.rand(sizes[0], 2, dtype=torch.float64), torch.rand(2, *sizes[1:], dtype=torch.float64)
    return left, right, (left @ right.flatten(1)).reshape(sizes)


@pytest.mark.parametrize("others", [None, (2, 3)])
def test_linear(others: tuple[int, int] | None) -> None:
    m, v = torch.randn(4, 7, 6, dtype=torch.float64), torch.rand(4, 7, 6, dtype=torch.float64)
    x = pg.Gaussian(m, variance=v)
    outputs = 5 if others is None else 10
    weight, bias = torch.randn(outputs, 6, dtype=torch.float64), torch.randn(outputs, dtype=torch.float64)
    bias_variance = torch.rand(5, dtype=torch.float64)
    left, both, _ = outer(5, 12)
    weight_variance, second = (left @ part for part in both.split(6, dim=1))
    of_mean, of_variance = (part.t() for part in both.split(6, dim=1))
    pairs = [
        (
            linear_random_input(x, weight, bias, weight_variance, bias_variance, second.t(), others),
            linear_low_rank(x, weight, bias, left, of_mean, of_variance, bias_variance, others),
        ),
        (
            linear_fixed_input(m, weight, bias, weight_variance, bias_variance, others),
            linear_low_rank(m, weight, bias, left, of_mean, None, bias_variance, others),
        ),
        (
            linear_fixed_weight(x, weight, bias, second, others),
            linear_low_rank(x, weight, bias, left, None, of_variance, None, others),
        ),
    ]
    for exact, low_rank in pairs:
        torch.testing.assert_close(low_rank.mean, exact.mean)
        torch.testing.assert_close(low_rank.variance, exact.variance)


def test_convolution() -> None:
    m, v = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.rand(2, 3, 5, 5, dtype=torch.float64)
    x = pg.Gaussian(m, variance=v)
    weight, bias = torch.randn(4, 3, 3, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    left, of_mean, weight_variance = outer(4, 3, 3, 3)
    of_variance = torch.rand_like(of_mean)
    second = torch.einsum("or,rikl->oikl", left, of_variance)
    kernel, own = left[:, :, None, None], torch.rand(4, dtype=torch.float64)
    pairs = [
        (
            convolution_independent(x, weight, bias, weight_variance, own, second, SETTINGS),
            convolution_low_rank(x, weight, bias, kernel, of_mean, of_variance, own, SETTINGS),
        ),
        (
            convolution_independent(m, weight, bias, weight_variance, None, None, SETTINGS),
            convolution_low_rank(m, weight, bias, kernel, of_mean, None, None, SETTINGS),
        ),
        (
            convolution_fixed_weight(x, weight, bias, second, SETTINGS),
            convolution_low_rank(x, weight, bias, kernel, None, of_variance, None, SETTINGS),
        ),
    ]
    for exact, low_rank in pairs:
        torch.testing.assert_close(low_rank.mean, exact.mean)
        torch.testing.assert_close(low_rank.variance, exact.variance)


# -- networks


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_whole_network(make: Any, shape: tuple[int, ...]) -> None:
    model, x, fresh = make(), torch.randn(shape), torch.randn(shape)
    random = posterior(model)
    exact = pg.streamline(model, random, x)
    low_rank = pg.streamline(model, random, x, variance_tolerance=0.1)
    assert deviation(exact(x), low_rank(x)) <= 0.1
    assert deviation(exact(fresh), low_rank(fresh)) <= 0.15
    torch.testing.assert_close(low_rank(fresh).mean, model(fresh))
    assert (low_rank(fresh).variance >= 0).all()
    assert sum(b.numel() for b in low_rank.buffers()) < 0.75 * sum(b.numel() for b in exact.buffers())
    assert "low rank in" in str(low_rank.plan) and "of rank 1" in str(low_rank.plan)
    (note,) = [n for n in low_rank.plan.notes if "variance_tolerance" in n]
    assert f"{deviation(exact(x), low_rank(x)):.2%} off on the example" in note


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_zero_is_exact(make: Any, shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    random = posterior(model)
    exact, same = pg.streamline(model, random, x), pg.streamline(model, random, x, variance_tolerance=0.0)
    assert same.code == exact.code
    torch.testing.assert_close(same(x).variance, exact(x).variance, rtol=0, atol=0)


def test_smaller_tolerances_are_kept_too() -> None:
    model, x = mlp(), torch.randn(64, 64)
    random = posterior(model)
    exact = pg.streamline(model, random, x)
    found = [deviation(exact(x), pg.streamline(model, random, x, variance_tolerance=t)(x)) for t in (0.2, 0.05, 0.01)]
    assert found[0] <= 0.2 and found[1] <= 0.05 and found[2] <= 0.01


def test_variances_far_from_low_rank_stay_as_they_are() -> None:
    model, x = mlp(), torch.randn(16, 64)
    variances = {n: torch.randn_like(p).mul(3).exp() * 1e-4 for n, p in model.named_parameters()}
    exact, low_rank = (
        pg.streamline(model, pg.DiagonalPosterior(variances), x, variance_tolerance=t) for t in (0.0, 0.01)
    )
    assert "low rank in 0 of 3 layers" in low_rank.plan.notes[-1]
    torch.testing.assert_close(low_rank(x).variance, exact(x).variance, rtol=0, atol=0)


def test_the_whole_network_is_held_to_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that pass alone may be too far off together: then each has to be closer."""
    model, x = mlp(), torch.randn(32, 64)
    random = posterior(model)
    exact = pg.streamline(model, random, x)
    monkeypatch.setattr(
        "propagauss.passes.low_rank_variances.Layer._error", lambda self, factors, x: 0.04 / factors.rank
    )
    low_rank = pg.streamline(model, random, x, variance_tolerance=0.02)
    assert deviation(exact(x), low_rank(x)) <= 0.02


def test_what_is_random_only_in_part() -> None:
    model, x = mlp(), torch.randn(32, 64)
    random = posterior(model, "0.weight", "0.bias")
    exact, low_rank = (pg.streamline(model, random, x, variance_tolerance=t) for t in (0.0, 0.1))
    assert deviation(exact(x), low_rank(x)) <= 0.1
    rules = [step.rule for step in low_rank.plan]
    assert "linear_fixed_input, low rank" in rules and "linear_fixed_weight, low rank" in rules


def test_grouped_and_transposed_convolutions_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3, groups=4), nn.ReLU(), nn.ConvTranspose2d(32, 16, 3)).eval()
    x = torch.randn(4, 32, 6, 6)
    exact, low_rank = (pg.streamline(model, posterior(model), x, variance_tolerance=t) for t in (0.0, 0.2))
    assert "low rank in 0 of 0 layers" in low_rank.plan.notes[-1]
    assert exact.code == low_rank.code


def test_double_precision_and_gradients() -> None:
    model, x = mlp().double(), torch.randn(8, 64, dtype=torch.float64)
    random = posterior(model)
    exact, low_rank = (pg.streamline(model, random, x, variance_tolerance=t) for t in (0.0, 0.1))
    assert low_rank(x).variance.dtype == torch.float64
    assert deviation(exact(x), low_rank(x)) <= 0.1
    one = x[:1].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: low_rank(t).variance, (one,))


def test_uncertain_input() -> None:
    model, x = mlp(), pg.Gaussian(torch.randn(32, 64), variance=torch.rand(32, 64))
    exact, low_rank = (pg.streamline(model, None, x, variance_tolerance=t) for t in (0.0, 0.1))
    assert deviation(exact(x), low_rank(x)) <= 0.1
    assert "low rank in 3 of 3" in low_rank.plan.notes[-1]


def test_the_batch_stays_open() -> None:
    model = mlp()
    low_rank = pg.streamline(model, posterior(model), torch.randn(8, 64), variance_tolerance=0.1)
    assert low_rank(torch.randn(3, 64)).mean.shape == (3, 5)


def test_export(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, x = cnn(), torch.randn(8, 3, 8, 8)
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x, variance_tolerance=0.1))
    files = both_files(classifier, tmp_path)
    graph = torch.from_numpy(runtime.InferenceSession(files[".onnx"]).run(["variance"], {"x": x.numpy()})[0])
    for variance in (torch.export.load(files[".pt2"]).module()(x)["variance"], graph):
        torch.testing.assert_close(variance, classifier.net(x).variance.detach(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_impossible_tolerance(tolerance: float) -> None:
    model = mlp()
    with pytest.raises(pg.InputError, match="variance_tolerance is"):
        pg.streamline(model, posterior(model), torch.randn(2, 64), variance_tolerance=tolerance)


def test_not_with_full_covariance() -> None:
    model = mlp()
    with pytest.raises(pg.InputError, match="covariance='diagonal'"):
        pg.streamline(model, posterior(model), torch.randn(2, 64), covariance="full", variance_tolerance=0.1)
