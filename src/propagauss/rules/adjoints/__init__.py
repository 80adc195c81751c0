"""Adjoints: how the sensitivity of the outputs to the result of an op becomes their sensitivity to its arguments."""

from propagauss.rules.adjoints import elementwise, entries, images, matrices, statistics
from propagauss.rules.adjoints.registry import ADJOINTS, PER_SAMPLE, adjoint, pulled_back, pulled_back_per_sample

__all__ = [
    "ADJOINTS",
    "PER_SAMPLE",
    "adjoint",
    "elementwise",
    "entries",
    "images",
    "matrices",
    "pulled_back",
    "pulled_back_per_sample",
    "statistics",
]
