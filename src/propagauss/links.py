"""Links, as `propagauss.links`: from a Gaussian over logits to probabilities of classes."""

from propagauss.likelihoods.links import (
    LINKS,
    Link,
    bridge,
    categorical,
    mean_field,
    monte_carlo,
    probit,
)

__all__ = ["LINKS", "Link", "bridge", "categorical", "mean_field", "monte_carlo", "probit"]
