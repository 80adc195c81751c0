"""Posteriors: Gaussians over named parameters, in several structures, and where they come from."""

from propagauss.posterior.base import Noise, Posterior, load_posterior
from propagauss.posterior.diagonal import DiagonalPosterior
from propagauss.posterior.fit import fit_laplace
from propagauss.posterior.full import FullPosterior
from propagauss.posterior.ivon import from_ivon
from propagauss.posterior.kronecker import KroneckerPosterior
from propagauss.posterior.laplace import from_laplace
from propagauss.posterior.low_rank import LowRankPosterior
from propagauss.posterior.spectral import SpectralPosterior
from propagauss.posterior.swag import from_swag

KINDS: dict[str, type[Posterior]] = {
    c.kind: c for c in (DiagonalPosterior, KroneckerPosterior, FullPosterior, SpectralPosterior, LowRankPosterior)
}

__all__ = [
    "KINDS",
    "DiagonalPosterior",
    "FullPosterior",
    "KroneckerPosterior",
    "LowRankPosterior",
    "Noise",
    "Posterior",
    "SpectralPosterior",
    "fit_laplace",
    "from_ivon",
    "from_laplace",
    "from_swag",
    "load_posterior",
]
