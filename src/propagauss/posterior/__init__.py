"""Posteriors: Gaussians over named parameters, in three structures."""

from propagauss.posterior.base import Noise, Posterior, load_posterior
from propagauss.posterior.diagonal import DiagonalPosterior
from propagauss.posterior.full import FullPosterior
from propagauss.posterior.kronecker import KroneckerPosterior

KINDS: dict[str, type[Posterior]] = {c.kind: c for c in (DiagonalPosterior, KroneckerPosterior, FullPosterior)}

__all__ = ["KINDS", "DiagonalPosterior", "FullPosterior", "KroneckerPosterior", "Noise", "Posterior", "load_posterior"]
