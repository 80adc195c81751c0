"""Two ideas of Calibrated Variance Propagation (arXiv 2606.16214), on top of streamlining.

Factors: the variances of each layer's weights are multiplied by a number `c_l ≥ 0`, such that on calibration inputs

    Σ_l c_l v_l ≈ v,    v_l streamlined with only layer l random, v the linearised variance of all layers

in the least squares of `Σ_l c_l v_l / v - 1`. Second moments: a layer norm divides by the root of the expected second
moment, which holds the variance of the row's entries as well as the square of their means.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from scipy.optimize import lsq_linear
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.methods.classify import Batches
from propagauss import Gaussian, rule
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.posteriors import DiagonalPosterior, KroneckerPosterior, Posterior
from propagauss.posteriors.kronecker import Eigenfactors

POINTS = 256  # calibration inputs, about
LEAST = 1e-3  # of a factor: a layer is never switched off


def with_factors(model: nn.Module, posterior: Posterior, validation: Batches) -> Posterior:
    factors = fit_factors(model, posterior, validation)
    return rescaled(posterior, {name: factors[layer_of(name)] for name in posterior.names})


@torch.no_grad()
def fit_factors(model: nn.Module, posterior: Posterior, validation: Batches) -> dict[str, float]:
    """By the path of the layer."""
    example, share = validation[0][0][:2], POINTS / sum(len(y) for _, y in validation)
    inputs = [x[: max(1, round(share * len(x)))] for x, _ in validation]

    def variances(net: Any) -> Tensor:
        return torch.cat([net(x).variance.flatten() for x in inputs]).double()

    layers = list(dict.fromkeys(layer_of(name) for name in posterior.names))
    own = {layer: [n for n in posterior.names if layer_of(n) == layer] for layer in layers}
    exact = variances(linearise(model, posterior, example, covariance="diagonal"))
    parts = [variances(streamline(model, posterior.select(*own[layer]), example)) / exact for layer in layers]
    found: Any = lsq_linear(torch.stack(parts, 1).numpy(), torch.ones(len(exact)).numpy(), (LEAST, float("inf")))
    return dict(zip(layers, found.x.tolist(), strict=True))


def layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def rescaled(posterior: Posterior, factors: dict[str, float]) -> Posterior:
    """With the variances of each parameter multiplied."""
    if isinstance(posterior, KroneckerPosterior):
        found = {n: Eigenfactors(f.left, f.right, factors[n] * f.variance) for n, f in dict(posterior._factors).items()}
        return posterior._with(found)
    assert isinstance(posterior, DiagonalPosterior)
    return posterior._with({n: factors[n] * v for n, v in dict(posterior._variances).items()})


# -- normalisation


@torch.library.custom_op("experiments::expected_norm", mutates_args=())
def expected_norm(x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps)


expected_norm.register_fake(lambda x, eps: torch.empty_like(x))


@rule(torch.ops.experiments.expected_norm.default, note="by the expected second moment")
def expected_norm_rule(x: Gaussian, eps: float) -> Gaussian:
    """`(x - μ) / √(mean_i (m_i - μ)² + v_i + ε)`"""
    centred = x.mean - x.mean.mean(-1, keepdim=True)
    gain = ((centred.square() + x.variance).mean(-1, keepdim=True) + eps).rsqrt()
    return x.scaled(centred * gain, gain)


class ExpectedNorm(nn.Module):
    """A layer norm without parameters, for the rule above."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return expected_norm(x, self.eps)


def with_second_moments(model: nn.Module) -> nn.Module:
    """A copy whose layer norms (those without parameters) have the rule above."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm) and not module.elementwise_affine:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, ExpectedNorm(module.eps))
    return model.eval()
