"""Posteriors: Gaussians over named parameters, in several structures, and where they come from."""

from propagauss.posteriors.base import Noise, Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.full import FullPosterior
from propagauss.posteriors.kinds import KINDS, load_posterior
from propagauss.posteriors.kronecker import KroneckerPosterior
from propagauss.posteriors.laplace.fit import fit_laplace
from propagauss.posteriors.low_rank import LowRankPosterior
from propagauss.posteriors.sources.ivon import from_ivon
from propagauss.posteriors.sources.laplace_torch import from_laplace
from propagauss.posteriors.sources.swag import from_swag
from propagauss.posteriors.spectral import SpectralPosterior

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
