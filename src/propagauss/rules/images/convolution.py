"""Convolutions: a linear layer on every patch of the input, all patches sharing one random weight.

With `a_l` the patch at place `l` (mean `m_l`), `h_ol = Σ_p W_op a_lp + b_o` and `S_lm = E[a_l a_mᵀ]`:

    E[h_ol] = Σ_p E[W_op] m_lp + E[b_o]
    Cov[h_ol, h_km] = Σ_pq E[W_op] E[W_kq] Cov(a_lp, a_mq) + Σ_pq S_lp,mq Cov(W_op, W_kq)
                      + Σ_p m_lp Cov(W_op, b_k) + Σ_q m_mq Cov(W_kq, b_o) + Cov(b_o, b_k)

which are the exact first two moments whenever `a` is independent of `W, b`. The full structure keeps all of it, with
`n²` numbers for a map of `n` entries, so it is for small maps. The diagonal structure keeps `o = k, l = m` only: each
variance is exact if the input entries are independent, but that neighbouring places move together, because they share
the weight and overlap, is lost. Later sums over places, such as average pooling, then come out too certain.

A transposed convolution is the same thing with other patches; `Layout` knows the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from propagauss.gaussian import Gaussian
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.kronecker import KroneckerPosterior
from propagauss.posteriors.low_rank import LowRankPosterior
from propagauss.rules.images.convolution_kernels import (
    convolution_fixed_weight,
    convolution_independent,
    convolution_of_values,
    convolution_random_bias,
    convolution_rooted,
    convolution_rotated,
)
from propagauss.rules.images.full_convolution import (
    BiasNoise,
    FullConvolution,
    IndependentNoise,
    JointNoise,
    KroneckerPlaces,
)
from propagauss.rules.images.kernel_covariance import directions, eigenfactors, joint, roots
from propagauss.rules.images.memory import require_memory_for_maps
from propagauss.rules.images.patches import Layout, read_settings
from propagauss.rules.kernels import Kernels
from propagauss.rules.matrices.linear import SHARED, describe
from propagauss.rules.registry import Built, Site, builder

aten = torch.ops.aten


@builder(
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.convolution.default,
    linear_in=(0, 1),
    adds=2,
    reads_weight=True,
)
def build_convolution(site: Site) -> Built | None:
    schema = site.op._schema
    arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    arguments |= {"transposed": "conv_transpose" in schema.name}
    arguments |= dict(zip((a.name for a in schema.arguments), site.args, strict=False)) | site.kwargs
    x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
    shape = site.shape(weight)
    if len(site.shape(x)) != len(shape):  # without a batch dimension
        return None
    layout = Layout(shape, read_settings(arguments, shape[2:]))
    w, b = site.weight(weight), None if bias is None else site.weight(bias)
    if w is None or (bias is not None and b is None):
        if site.options.full and site.is_random((weight, bias)):
            return None
        return Built(convolution_of_values, (x, weight, bias, layout.settings), "operands independent: exact variances")
    offset, names, images = None if b is None else b.tensor.clone(), (w.name, b and b.name), site.shape(x)
    layer = Convolution(x, site.is_random(x), w.tensor, offset, names, site.posterior, layout, images[1:])
    if site.options.full:
        layer = replace(layer, frames=images[0] * site.positions(x) // images[:-1].numel())
        known = None if w.name is None else type(site.posterior)
        require_memory_for_maps(known, layout, layer.entry, layer.frames, layer.random_input, w.tensor)
    return KERNELS.of(site.options.covariance, layer.kind, layer)


class OnlyBias:
    """The kind of noise of a convolution with a fixed weight and a random bias."""


@dataclass(frozen=True)
class Convolution:
    """A convolution that is known when the model is streamlined, at the place where it is used."""

    x: Any  # the argument that is its input
    random_input: bool
    weight: Tensor  # as the model stores it
    bias: Tensor | None
    names: tuple[str | None, str | None]  # of weight and bias, where they are random
    posterior: Any  # of the kind that a kernel is registered for
    layout: Layout
    entry: torch.Size  # of one image of the input
    frames: int = 1  # images of one sample that lie in the batch dimension, for the full structure

    @property
    def kind(self) -> type:
        """The kind of noise that it adds."""
        weight, bias = self.names
        return type(self.posterior) if weight is not None else NoneType if bias is None else OnlyBias

    @property
    def name(self) -> str:
        """Of a random weight."""
        assert self.names[0] is not None
        return self.names[0]

    def bias_from(self, read: Callable[[str], Tensor]) -> Tensor | None:
        """What the posterior says of a random bias."""
        return None if self.names[1] is None else read(self.names[1])


# (covariance structure, kind of noise) -> what to call at run time
KERNELS: Kernels[Built] = Kernels()


# -- diagonal structure


@KERNELS.add("diagonal", NoneType)
def _fixed_weight(layer: Convolution) -> Built:
    """`var = v * W²`"""
    weight = _copied(layer.weight, layer.layout)
    inputs = (layer.x, weight, layer.bias, weight.square(), layer.layout.settings)
    return Built(convolution_fixed_weight, inputs, _note(layer))


@KERNELS.add("diagonal", OnlyBias)
def _random_bias(layer: Convolution) -> Built:
    """`var = v_b + v * W²`"""
    return _variances(layer, convolution_random_bias, layer.bias_from(layer.posterior.variance))


@KERNELS.add("diagonal", DiagonalPosterior)
def _independent_weights(layer: Convolution) -> Built:
    """`var = m² * V + v_b + v * (W² + V)`"""
    return _variances(layer, convolution_independent, _variance(layer), layer.bias_from(layer.posterior.variance))


@KERNELS.add("diagonal", KroneckerPosterior)
def _rotated_patches(layer: Convolution) -> Built | None:
    """`var_o = Σ_q D_oq (Q_Aᵀ m_l)²_q + v_b + v * (W² + V)`, `D_oq = Σ_p (Q_B)²_op G_pq`"""
    layout, factors = layer.layout, eigenfactors(layer.posterior, layer.name, layer.layout)
    if factors is None:
        return None
    assert factors.right is not None
    rotation = _copied(layout.kernels(factors.right.mT.repeat(layout.groups, 1)), layout)
    mixing = factors.left.square() @ factors.variance
    mixing = mixing.reshape(*mixing.shape, *[1] * (layer.weight.dim() - 2))
    return _variances(layer, convolution_rotated, rotation, mixing, layer.bias_from(layer.posterior.variance))


@KERNELS.add("diagonal", LowRankPosterior)
def _few_directions(layer: Convolution) -> Built:
    """`var_o = Σ_r (R_or * m + ρ_or)² + m² * D + d_b + v * (W² + V)` with directions `R` and variances `D` beside."""
    posterior = layer.posterior
    if posterior.rank == 0:
        return _independent_weights(layer)
    kernels, offsets = directions(posterior, layer.name, layer.names[1], layer.layout)
    apart = _copied(posterior.own_variance(layer.name), layer.layout), layer.bias_from(posterior.own_variance)
    return _variances(layer, convolution_rooted, _copied(kernels, layer.layout), offsets, after=apart)


@KERNELS.add("diagonal", Posterior)
def _all_directions(layer: Convolution) -> Built:
    """`var_o = Σ_r (R_or * m + ρ_or)² + v * (W² + V)`, `(R_or, ρ_or)` the columns of a root of `Cov(W_o, b_o)`"""
    kernels, offsets = roots(*joint(layer.posterior, layer.name, layer.names[1], layer.layout), layer.layout)
    return _variances(layer, convolution_rooted, _copied(kernels, layer.layout), offsets)


def _variances(layer: Convolution, kernel: Callable[..., Gaussian], *own: Any, after: tuple[Any, ...] = ()) -> Built:
    """A kernel that takes `(x, weight, bias, *own, E[W²] for a random input, settings, *after)`."""
    weight = _copied(layer.weight, layer.layout)
    second = None
    if layer.random_input:
        second = weight.square() if layer.names[0] is None else weight.square() + _variance(layer)
    return Built(kernel, (layer.x, weight, layer.bias, *own, second, layer.layout.settings, *after), _note(layer))


def _variance(layer: Convolution) -> Tensor:
    """Marginal variances of a random weight."""
    return _copied(layer.posterior.variance(layer.name).reshape(layer.weight.shape), layer.layout)


def _note(layer: Convolution) -> str:
    note = describe(*layer.names, layer.random_input, "exact variances, correlation between places dropped")
    return f"{note}; {SHARED}" if any(layer.names) else note


def _copied(kernel: Tensor, layout: Layout) -> Tensor:
    """A copy, since the network must not change when the model is trained on, in the order that is fastest on a CPU.

    Kernels stored channels last make the op compute, and return, its images so: less time for large images, such as
    those of a ResNet, and a little more for tiny ones. Double precision and convolutions in groups gain nothing.
    """
    last = kernel.dim() == 4 and layout.groups == 1 and kernel.dtype != torch.float64
    return kernel.clone(memory_format=torch.channels_last if last else torch.contiguous_format)


# -- full structure


@KERNELS.add("full", NoneType)
def _fixed_weight_both_sides(layer: Convolution) -> Built:
    """Both sides of the covariance go through the op itself."""
    weight = layer.weight.clone(memory_format=torch.contiguous_format)
    inputs = (layer.x, weight, layer.bias, weight.square(), layer.layout.settings)
    return Built(convolution_fixed_weight, inputs, _exact(layer))


@KERNELS.add("full", OnlyBias)
def _bias_over_places(layer: Convolution) -> Built:
    covariance = layer.bias_from(layer.posterior.covariance)
    assert covariance is not None
    return _over_places(layer, BiasNoise(covariance))


@KERNELS.add("full", DiagonalPosterior)
def _independent_over_places(layer: Convolution) -> Built:
    variance = layer.layout.rows(layer.posterior.variance(layer.name)).reshape(_blocks(layer.layout)).clone()
    bias = layer.bias_from(layer.posterior.variance)
    return _over_places(layer, IndependentNoise(variance, None if bias is None else bias.clone()))


@KERNELS.add("full", KroneckerPosterior)
def _kronecker_over_places(layer: Convolution) -> Built | None:
    factors = eigenfactors(layer.posterior, layer.name, layer.layout)
    if factors is None:
        return None
    bias = layer.bias_from(layer.posterior.covariance)
    return _over_places(layer, KroneckerPlaces(factors, bias, layer.layout, layer.entry))


@KERNELS.add("full", Posterior)
def _joint_over_places(layer: Convolution) -> Built:
    ww, wb, bb = joint(layer.posterior, layer.name, layer.names[1], layer.layout)
    blocks = _blocks(layer.layout)
    noise = JointNoise(ww.reshape(*blocks, *blocks), None if wb is None else wb.reshape(*blocks, -1), bb)
    return _over_places(layer, noise)


def _over_places(layer: Convolution, noise: nn.Module) -> Built:
    """`Cov[h_ol, h_km]` with the noise of a posterior, between all places."""
    weight = layer.weight.clone(memory_format=torch.contiguous_format)
    index = layer.layout.index(layer.entry, layer.frames).to(weight.device)
    module = FullConvolution(weight, layer.bias, noise, index, layer.frames, layer.layout.settings)
    return Built(module, (layer.x,), _exact(layer))


def _blocks(layout: Layout) -> tuple[int, int, int]:
    return layout.groups, layout.out // layout.groups, layout.width


def _exact(layer: Convolution) -> str:
    return describe(*layer.names, layer.random_input, "exact moments")
