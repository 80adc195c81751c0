"""Every likelihood, with `p(y | f)` as torch has it. A new one is a line in CASES, which brings the contract."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Normal, Poisson

from propagauss.likelihoods import CategoricalLikelihood, GaussianLikelihood, Likelihood, PoissonLikelihood


@dataclass(frozen=True)
class Case:
    """A likelihood and `conditional(f [B, C]) -> p(y | f)`, at unit noise."""

    likelihood: Likelihood
    conditional: Callable[[Tensor], Distribution]
    outputs: int = 3

    def targets(self, f: Tensor) -> Tensor:
        torch.manual_seed(1)
        return self.conditional(f).sample()


CASES = {
    "classification": Case(
        CategoricalLikelihood("monte_carlo", samples=1 << 14), lambda f: Categorical(logits=f), outputs=4
    ),
    "regression": Case(GaussianLikelihood(torch.ones(())), lambda f: Normal(f, 1.0)),
    "poisson": Case(PoissonLikelihood(), lambda f: Poisson(f.exp())),
}
