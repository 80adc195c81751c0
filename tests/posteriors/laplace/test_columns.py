"""Dense outputs: sums of columns with random signs, in place of all of them."""

import pytest
import torch
from torch import nn

from propagauss import fit_laplace
from propagauss.posteriors.laplace import columns

torch.set_num_threads(1)


def test_few_columns_are_left_alone():
    given = torch.randn(3, 4, columns.EXACT)
    column, count = columns.few(lambda c: given[..., c], columns.EXACT, seed=0)
    assert count == columns.EXACT and column(5).equal(given[..., 5])


def test_sums_have_the_same_curvature_on_average():
    """Every sample has the same columns here, and signs of its own."""
    torch.manual_seed(0)
    samples, count = 2000, columns.EXACT + 88
    given = torch.randn(4, count, dtype=torch.float64)
    column, few = columns.few(lambda c: given[:, c].expand(samples, 4), count, seed=0)
    found = sum(column(c).mT @ column(c) for c in range(few)) / samples
    expected = given @ given.mT
    # of count · count / few products of two columns in a group, with random signs, the mean over the samples
    error = (2 * count * count / few / samples) ** 0.5
    assert few == columns.FEW and ((found - expected).abs() < 6 * error).all() and error < 0.01 * count


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_fit_of_a_class_for_each_pixel(structure, monkeypatch):
    """Close to the exact one: the scatter over samples and positions is small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)).eval()
    x, y = torch.randn(24, 1, 19, 19), torch.randint(0, 3, (24, 19, 19))
    found = fit_laplace(model, [(x, y)], structure=structure, prior_precision=1.0, progress=False)
    monkeypatch.setattr(columns, "EXACT", 10**6)
    exact = fit_laplace(model, [(x, y)], structure=structure, prior_precision=1.0, progress=False)
    for name in exact.names:
        ratio = found.variance(name) / exact.variance(name)
        assert (ratio.log().abs() < 0.2).all() and abs(float(ratio.log().mean())) < 0.1
