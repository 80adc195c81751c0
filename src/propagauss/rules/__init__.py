"""Rules: how each ATen op maps Gaussians to Gaussians. Importing this package registers the built-in ones."""

from propagauss.rules import (
    activation,
    arithmetic,
    attention,
    convolution,
    linear,
    moments,
    normalisation,
    pooling,
    row_norm,
    shape,
)
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
    "attention",
    "builder",
    "convolution",
    "linear",
    "moments",
    "normalisation",
    "pooling",
    "row_norm",
    "rule",
    "shape",
]
