"""What `python -m experiments.play` computes beside training, which is left to the command."""

import torch

from experiments.play.__main__ import elsewhere, facts, grey
from experiments.play.network import moved, network
from experiments.play.predictor import histogram, relative


def test_relative_uncertainty_is_the_sum_over_pairs():
    torch.manual_seed(0)
    mean, root = torch.randn(4, 5), torch.randn(4, 5, 5)
    covariance = root @ root.mT
    variances = covariance.diagonal(dim1=1, dim2=2)
    pairs = variances[:, :, None] + variances[:, None] - 2 * covariance
    gaps = (mean[:, :, None] - mean[:, None]).square()
    torch.testing.assert_close(relative(mean, covariance), (pairs.sum((1, 2)) / gaps.sum((1, 2))).sqrt())
    common = covariance + 3.0  # a shift of all outputs changes no probability, and does not count
    torch.testing.assert_close(relative(mean, common), relative(mean, covariance))


def test_moved_images_are_images_of_the_same_size():
    x = torch.rand(3, 1, 28, 28)
    assert moved(x).shape == x.shape and moved(x).min() >= 0 and moved(x).max() <= 1
    assert network()(x).shape == (3, 10)


def test_facts_say_where_images_lie():
    probabilities, labels = 0.9 * torch.eye(10) + 0.01, torch.arange(10)
    known, unknown = torch.linspace(0.1, 1, 10), torch.linspace(0.8, 1.7, 10)
    found = facts((probabilities, probabilities, known), labels, (probabilities, probabilities, unknown))
    assert found["told"]["accuracy"] == "100.0%" and found["told"]["above"] == "80.0%"
    assert found["quantiles"][0] == 0.1 and found["quantiles"][-1] == 1
    assert abs(sum(histogram(known, 0.1, 1.0)) - 1) < 1e-4
    assert elsewhere({"one": known, "two": unknown}, found["usual"]) == "one 10.0%, two 80.0%"


def test_other_images_are_made_grey_and_small():
    assert grey(torch.rand(2, 3, 64, 64)).shape == (2, 1, 28, 28)
    x = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(grey(x), x)
