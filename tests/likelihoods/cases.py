"""Every likelihood, with `p(y | f)` as torch has it. A new one is a line in CASES, which brings the contract."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Exponential, Normal, Poisson

from propagauss.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    ExponentialLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
)


@dataclass(frozen=True)
class Case:
    """A likelihood and `conditional(f [B, C]) -> p(y | f)`, at unit noise.

    `fisher` is for a Hessian that is linear in `y`: its mean over `y`, the Fisher matrix, is then that at the mean of
    `y`. A curvature that is neither needs tests of its own.
    """

    likelihood: Likelihood
    conditional: Callable[[Tensor], Distribution]
    outputs: int = 3
    fisher: bool = False

    def targets(self, f: Tensor) -> Tensor:
        torch.manual_seed(1)
        return self.conditional(f).sample()

    def curved(self, f: Tensor, y: Tensor) -> Tensor:
        """The targets at which the Hessian of the loss is the curvature."""
        return self.conditional(f).mean if self.fisher else y


CASES = {
    "classification": Case(
        CategoricalLikelihood("monte_carlo", samples=1 << 14), lambda f: Categorical(logits=f), outputs=4
    ),
    "binary": Case(BernoulliLikelihood("quadrature"), lambda f: Bernoulli(logits=f)),
    "regression": Case(GaussianLikelihood(torch.ones(())), lambda f: Normal(f, 1.0)),
    "poisson": Case(PoissonLikelihood(), lambda f: Poisson(f.exp())),
    "exponential": Case(ExponentialLikelihood(), lambda f: Exponential(f.exp()), fisher=True),
}
