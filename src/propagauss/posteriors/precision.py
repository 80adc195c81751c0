"""The same curvature under another prior: posteriors of many prior precisions from one fit."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from propagauss.checks import positive
from propagauss.errors import PosteriorError
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.kronecker import KroneckerPosterior
from propagauss.posteriors.spectral import SpectralPosterior


def with_prior_precision(posterior: Posterior, precision: float) -> Posterior:
    """`(H + δ' I)⁻¹` from `(H + δ I)⁻¹`: each variance `v` along an eigenvector becomes `1 / (1/v - δ + δ')`.

    For what `fit_laplace` returns with one prior precision for all parameters.
    """
    new = positive(precision, "the prior precision", PosteriorError)
    known = posterior.details.get("prior_precision")
    if not isinstance(known, float):
        raise PosteriorError("the posterior does not say which prior precision it has: give one from fit_laplace")

    def changed(variance: Tensor) -> Tensor:
        curvature = (1 / variance.double() - known).clamp(min=0)
        return (1 / (curvature + new)).to(variance)

    if isinstance(posterior, DiagonalPosterior):
        found: Posterior = posterior._with({n: changed(posterior.variance(n)) for n in posterior.names})
    elif isinstance(posterior, KroneckerPosterior):
        factors = posterior._factors.items()
        found = posterior._with({n: replace(f, variance=changed(f.variance)) for n, f in factors})
    elif isinstance(posterior, SpectralPosterior):
        found = posterior._with(_variances=changed(posterior._variances), _rest=1 / new)
    else:
        raise PosteriorError(f"the prior precision of a {type(posterior).__name__} cannot be exchanged: fit it again")
    found.details = {name: value for name, value in posterior.details.items() if name != "log_marginal_likelihood"}
    found.details["prior_precision"] = new
    return found
