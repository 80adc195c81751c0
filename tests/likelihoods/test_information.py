"""The mutual information of class and latent, against many draws of the latent."""

import pytest
import torch

from propagauss import Gaussian
from propagauss.chosen import ChosenGaussian
from propagauss.likelihoods import BernoulliLikelihood, CategoricalLikelihood
from propagauss.likelihoods.information import information_of_classes
from propagauss.structures import FULL

F64 = torch.float64
DRAWS = 200_000  # within half a per cent


def latent(batch: int = 4, classes: int = 5, size: float = 1.0) -> Gaussian:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(batch, classes, classes, generator=generator, dtype=F64)
    mean = torch.randn(batch, classes, generator=generator, dtype=F64)
    return Gaussian(mean, covariance=size * root @ root.mT / classes)


def by_draws(latent: Gaussian, draws: int = DRAWS) -> torch.Tensor:
    p = latent.sample((draws,), torch.Generator().manual_seed(1)).softmax(-1)
    mean = p.mean(0)
    return -torch.xlogy(mean, mean).sum(-1) + torch.xlogy(p, p).sum(-1).mean(0)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("full", [False, True], ids=["variance", "covariance"])
def test_against_draws(size, full):
    g = latent(size=size)
    g = g if full else Gaussian(g.mean, g.variance)
    found = CategoricalLikelihood("monte_carlo", samples=1 << 12).decompose(g).epistemic
    torch.testing.assert_close(found, by_draws(g), rtol=0.02, atol=1e-6)


def test_the_covariance_of_all_logits_together_does_not_count():
    mean = torch.randn(3, 4, dtype=F64)
    found = information_of_classes(mean, torch.full((3, 4, 4), 2.0, dtype=F64))
    assert (found < 1e-10).all()


def test_in_single_precision_it_is_not_lost_to_rounding():
    g = latent(size=1e-5)
    single = information_of_classes(g.mean.float(), g.covariance.float())
    torch.testing.assert_close(single.double(), information_of_classes(g.mean, g.covariance), rtol=0.05, atol=1e-9)


def test_a_large_batch_in_parts(monkeypatch):
    g = latent(batch=20)
    whole = information_of_classes(g.mean, g.covariance)
    monkeypatch.setattr("propagauss.likelihoods.links.CACHED", 512 * 5 * 3)
    torch.testing.assert_close(information_of_classes(g.mean, g.covariance), whole)
    shaped = information_of_classes(g.mean.reshape(4, 5, 5), g.covariance.reshape(4, 5, 5, 5))
    torch.testing.assert_close(shaped, whole.reshape(4, 5))
    assert information_of_classes(g.mean[:0], g.covariance[:0]).shape == (0,)


def test_some_classes_chosen():
    """Those that are not keep the probability of the plain softmax, whatever the latent."""
    g = latent(classes=3)
    mean = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(2))
    index = torch.tensor([1, 4, 5]).expand(4, 3)
    found = CategoricalLikelihood(samples=1 << 12).decompose(ChosenGaussian.over(mean, index, FULL, g.covariance))
    plain = mean.softmax(-1)
    within = Gaussian(mean.gather(1, index), covariance=g.covariance)
    f = within.sample((DRAWS,), torch.Generator().manual_seed(1))
    p = plain.scatter(1, index, 0.0).expand(len(f), 4, 6).clone()
    p.scatter_(2, index.expand(len(f), 4, 3), plain.gather(1, index).sum(1, keepdim=True) * f.softmax(-1))
    mean_p = p.mean(0)
    expected = -torch.xlogy(mean_p, mean_p).sum(-1) + torch.xlogy(p, p).sum(-1).mean(0)
    torch.testing.assert_close(found.epistemic, expected, rtol=0.02, atol=1e-6)


def test_of_logits_that_differ_by_a_lot_it_is_never_more_than_the_entropy():
    g = Gaussian(torch.tensor([[0.0, 50.0, -80.0]]), torch.tensor([[1e6, 1e-3, 1e9]]))
    parts = CategoricalLikelihood("mean_field").decompose(g)
    assert (parts.epistemic >= 0).all() and (parts.aleatoric >= 0).all() and parts.total.isfinite().all()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_with_a_temperature_it_is_part_of_the_entropy_that_is_predicted(temperature):
    """What a link gives for `m / T` and the variance are its probabilities to the power `1 / T`, and so is the rest."""
    g = latent(size=4.0)
    parts = CategoricalLikelihood("mean_field", samples=1 << 12, temperature=temperature).decompose(g)
    same = Gaussian(g.mean / temperature, covariance=g.covariance)
    torch.testing.assert_close(
        parts.total, CategoricalLikelihood("mean_field").decompose(same).total, rtol=0.01, atol=1e-6
    )
    torch.testing.assert_close(parts.epistemic, by_draws(same), rtol=0.02, atol=1e-6)
    single = BernoulliLikelihood(temperature=temperature).decompose(Gaussian(g.mean, g.variance))
    expected = BernoulliLikelihood().decompose(Gaussian(g.mean / temperature, g.variance))
    torch.testing.assert_close(single.epistemic, expected.epistemic)
    torch.testing.assert_close(single.total, expected.total, rtol=0.05, atol=0.01)
