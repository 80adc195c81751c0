"""Rules: how each ATen op maps Gaussians to Gaussians. Importing this package registers the built-in ones."""

from propagauss.rules import activation, arithmetic, linear, moments, normalisation, shape
from propagauss.rules.registry import BUILDERS, FUNCTIONS, Built, Options, Site, Weight, builder, rule

__all__ = [
    "BUILDERS",
    "FUNCTIONS",
    "Built",
    "Options",
    "Site",
    "Weight",
    "activation",
    "arithmetic",
    "builder",
    "linear",
    "moments",
    "normalisation",
    "rule",
    "shape",
]
