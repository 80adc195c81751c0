"""Rules: how each ATen op maps Gaussians to Gaussians. Importing this package registers the built-in ones."""

from propagauss.rules import known_ops
from propagauss.rules.elementwise import activation, arithmetic, moments
from propagauss.rules.entries import fixed, joining, ordering, scatter, shape
from propagauss.rules.images import convolution, pooling, sampling
from propagauss.rules.matrices import attention, contractions, distances, linear, products, weights
from propagauss.rules.statistics import normalisation, reductions, row_norm

from propagauss.rules.entries import aliases  # isort: skip (last: it gives the rules above to other names)
from propagauss.rules.registry import BUILDERS, FUNCTIONS, Built, Options, Site, Weight, builder, rule

__all__ = [
    "BUILDERS",
    "FUNCTIONS",
    "Built",
    "Options",
    "Site",
    "Weight",
    "activation",
    "aliases",
    "arithmetic",
    "attention",
    "builder",
    "contractions",
    "convolution",
    "distances",
    "fixed",
    "joining",
    "known_ops",
    "linear",
    "moments",
    "normalisation",
    "ordering",
    "pooling",
    "products",
    "reductions",
    "row_norm",
    "rule",
    "sampling",
    "scatter",
    "shape",
    "weights",
]
