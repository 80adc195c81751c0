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
    HeteroscedasticLikelihood,
    Likelihood,
    PoissonLikelihood,
)


@dataclass(frozen=True)
class Case:
    """A likelihood and `conditional(f [B, C]) -> p(y | f)`, at unit noise.

    `fisher` is for a Hessian that is quadratic in `y`: its mean over `y`, the Fisher matrix, is then the mean of two,
    one standard deviation below and above the mean of `y`. A curvature that is neither needs tests of its own.
    `moments` is for a predictive that has the mean and the variance of the true one, but not its shape.
    """

    likelihood: Likelihood
    conditional: Callable[[Tensor], Distribution]
    outputs: int = 3
    fisher: bool = False
    moments: bool = False

    def targets(self, f: Tensor) -> Tensor:
        torch.manual_seed(1)
        return self.conditional(f).sample()

    def curved(self, f: Tensor, y: Tensor) -> list[Tensor]:
        """The targets over which the mean Hessian of the loss is the curvature."""
        p = self.conditional(f)
        return [p.mean - p.stddev, p.mean + p.stddev] if self.fisher else [y]


CASES = {
    "classification": Case(
        CategoricalLikelihood("monte_carlo", samples=1 << 14), lambda f: Categorical(logits=f), outputs=4
    ),
    "binary": Case(BernoulliLikelihood("quadrature"), lambda f: Bernoulli(logits=f)),
    "regression": Case(GaussianLikelihood(torch.ones(())), lambda f: Normal(f, 1.0)),
    "heteroscedastic": Case(
        HeteroscedasticLikelihood(),
        lambda f: Normal(f[..., :1], (f[..., 1:] / 2).exp()),
        outputs=2,
        fisher=True,
        moments=True,
    ),
    "poisson": Case(PoissonLikelihood(), lambda f: Poisson(f.exp())),
    "exponential": Case(ExponentialLikelihood(), lambda f: Exponential(f.exp()), fisher=True),
}
