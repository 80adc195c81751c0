"""Products of independent values with joint covariances: against the exact moments, literally, samples included."""

import pytest
import torch
from torch import Tensor

import propagauss as pg
from propagauss.rules.matrices.linear import linear, matmul
from propagauss.rules.matrices.products import einsum
from reference import bilinear, random_psd


def value(*shape: int, samples: int, seed: int) -> pg.Gaussian:
    """`samples` runs of numbers in a tensor; 1 for a parameter, which has none."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(shape, dtype=torch.float64, generator=generator)
    return pg.Gaussian.full(mean, random_psd(mean.numel() // samples, samples, 1.0, generator))


CASES = [
    ("bi,bj->bij", ((3, 2), 3), ((3, 4), 3)),
    ("bij,bjk->bik", ((3, 2, 2), 3), ((3, 2, 1), 3)),
    ("bhij,bhjk->bhik", ((3, 2, 1, 2), 3), ((3, 2, 2, 1), 3)),  # heads
    ("ni,nij->nj", ((6, 2), 3), ((6, 2, 2), 3)),  # two rows of each sample in the first dimension
    ("bi,ij->bj", ((3, 2), 3), ((2, 2), 1)),  # a parameter
    ("ij,kj->ik", ((2, 3), 1), ((2, 3), 1)),  # two of them
    ("bi,bj->b", ((3, 2), 3), ((3, 2), 3)),  # sums on both sides
    ("b...i,bi->b...", ((3, 2, 1, 2), 3), ((3, 2), 3)),
]


@pytest.mark.parametrize("equation, first, second", CASES)
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_moments_of_an_einstein_sum(equation: str, first: tuple, second: tuple, structure: str) -> None:
    a, b = value(*first[0], samples=first[1], seed=1), value(*second[0], samples=second[1], seed=2)
    samples = max(first[1], second[1])
    if structure == "diagonal":
        given = [pg.Gaussian.diagonal(x.mean, x.variance) for x in (a, b)]
        a, b = (pg.Gaussian.full(x.mean, torch.diag_embed(x.covariance.diagonal(dim1=1, dim2=2))) for x in (a, b))
    else:
        given = [a, b]
    g = einsum(equation, given)
    torch.testing.assert_close(g.mean, torch.einsum(equation, a.mean, b.mean))
    for k in range(samples):
        parts = [_run(x, k, samples) for x in (a, b)]

        def product(p: Tensor, q: Tensor, parts=parts) -> Tensor:
            return torch.einsum(equation, p.reshape(parts[0][0]), q.reshape(parts[1][0])).flatten()

        (_, m_a, c_a), (_, m_b, c_b) = parts
        expected = bilinear(product, m_a, c_a, m_b, c_b, True)
        if structure == "full":
            torch.testing.assert_close(g.covariance[k], expected)
        else:
            torch.testing.assert_close(g.variance.reshape(samples, -1)[k], expected.diagonal())


def _run(x: pg.Gaussian, k: int, samples: int) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Shape, mean and covariance of one sample."""
    if x.covariance.shape[0] == 1:
        return tuple(x.shape), x.mean.flatten(), x.covariance[0]
    shape = (x.shape[0] // samples, *x.shape[1:])
    return shape, x.mean.reshape(samples, -1)[k], x.covariance[k]


def test_a_layer_with_a_computed_weight_and_samples() -> None:
    x, w, b = value(3, 2, samples=3, seed=1), value(4, 2, samples=1, seed=2), value(4, samples=1, seed=3)
    g = linear(x, w, b)
    expected = matmul(x, w.mapped(w.mean.t(), lambda t: t.t())).covariance + b.covariance
    assert g.covariance.shape == (3, 4, 4)
    torch.testing.assert_close(g.covariance, expected)


def test_a_sum_over_fixed_factors_is_taken_before_the_square() -> None:
    x = pg.Gaussian(torch.ones(2, 3), torch.ones(2, 3))
    g = einsum("bi,ij->b", [x, torch.ones(3, 4)])
    torch.testing.assert_close(g.variance, torch.full((2,), 3 * 16.0))
