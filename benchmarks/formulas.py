"""The formulas of the library by hand, in plain PyTorch: what overhead is measured against."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import Predict


def linear_layers(model: nn.Sequential) -> list[tuple[str, nn.Linear]]:
    return [(name, layer) for name, layer in model.named_children() if isinstance(layer, nn.Linear)]


def diagonal(model: nn.Sequential, variances: dict[str, Tensor]) -> Predict:
    """ReLU MLP, independent weights: `var = m² Vᵀ + v_b + v (W² + V)ᵀ`, linearised activations."""
    constants = [
        (
            layer.weight.detach().clone(),
            layer.bias.detach().clone(),
            variances[f"{name}.weight"],
            variances[f"{name}.bias"],
            (layer.weight.detach().square() + variances[f"{name}.weight"]).t(),
        )
        for name, layer in linear_layers(model)
    ]
    (w1, b1, v1, vb1, _), *others = constants

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        m = F.linear(x, w1, b1)
        v = F.linear(x * x, v1, vb1)
        for w, b, variance, bias_variance, second_t in others:
            v = v * (m > 0)
            m = m.relu()
            v = torch.addmm(F.linear(m * m, variance, bias_variance), v, second_t)
            m = F.linear(m, w, b)
        return m, v

    return predict


def kronecker_literal(model: nn.Sequential, factors: dict[str, tuple[Tensor, Tensor, Tensor]]) -> Predict:
    """The paper's Kronecker formulas word for word, with its approximation of the posterior `Σ = B ⊗ A`.

    `Cov[h] = tr(A S) B + W C Wᵀ + Cov(b)`, `S = m mᵀ + C`, then `J C J`; the input has the covariance `C = 0`, stored.

    Args:
        factors: by layer, covariance factors `B [out, out]`, `A [in, in]` and the covariance of the bias `[out, out]`.
    """
    layers = [(layer.weight.detach(), layer.bias.detach(), *factors[name]) for name, layer in linear_layers(model)]

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        m, c = x, x.new_zeros(x.shape[0], x.shape[1], x.shape[1])
        for i, (w, b, left, right, bias) in enumerate(layers):
            if i:
                jacobian = torch.diag_embed((m > 0).to(m.dtype))
                m, c = m.relu(), jacobian @ c @ jacobian
            s = m.unsqueeze(-1) * m.unsqueeze(-2) + c
            c = (s * right).sum((-2, -1))[:, None, None] * left + w @ c @ w.mT + bias
            m = F.linear(m, w, b)
        return m, c

    return predict


def diagonal_products(sizes: list[int], random: list[bool] | None = None) -> float:
    """Multiplications of the diagonal formulas over those of the plain forward.

    A layer needs its own product, one for random weights and one for a random input; elementwise work counts nothing.

    Args:
        sizes: widths, input and output included.
        random: whether the weights of each layer are; by default all.
    """
    ours = plain = 0
    reached = False
    for (inputs, outputs), is_random in zip(pairwise(sizes), random or [True] * (len(sizes) - 1), strict=True):
        # random weights on a random input share one product: v (W² + V)ᵀ holds both of their terms in v
        ours += inputs * outputs * (1 + is_random + reached)
        plain += inputs * outputs
        reached = reached or is_random
    return ours / plain


def kronecker_full_products(sizes: list[int]) -> float:
    """As `diagonal_products`: the mean, the rotation of `m` and `W C Wᵀ`; what depends on the spectrum is left out."""
    ours = plain = 0
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        plain += inputs * outputs
        ours += inputs * outputs + inputs**2
        if i:
            ours += inputs**2 * outputs + inputs * outputs**2
    return ours / plain
