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

import glob
from typing import Any

import torch
from torch import Tensor, nn

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian, mean_of, symmetric_root
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.kronecker import Eigenfactors, KroneckerPosterior
from propagauss.posteriors.laplace.curvature import require_memory
from propagauss.posteriors.low_rank import LowRankPosterior
from propagauss.rules.images.full_convolution import (
    BiasNoise,
    FullConvolution,
    IndependentNoise,
    JointNoise,
    KroneckerPlaces,
)
from propagauss.rules.images.patches import Layout, Settings, convolve, read_settings
from propagauss.rules.matrices.linear import SHARED, describe
from propagauss.rules.matrices.precision import in_full_precision
from propagauss.rules.registry import Built, Site, Weight, builder

aten = torch.ops.aten

# -- diagonal structure


def convolution_fixed_weight(
    x: Gaussian, weight: Tensor, bias: Tensor | None, squared: Tensor, settings: Settings
) -> Gaussian:
    """Fixed weights, random input: `var = v * W²`; in the full structure both sides of the covariance go through."""
    mean = convolve(x.mean, weight, bias, settings)
    return x.mapped(mean, lambda t: convolve(t, weight, None, settings), lambda v: _spread(v, squared, None, settings))


def convolution_random_bias(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor,
    bias_spread: Tensor,
    second: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """Only the bias is random: `var = v_b + v * W²`."""
    mean = convolve(mean_of(x), weight, bias, settings)
    own = bias_spread.reshape(-1, *[1] * (mean.dim() - 2)).expand_as(mean)
    return Gaussian.diagonal(mean, _with_input(own, x, second, settings))


def convolution_independent(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spread: Tensor,
    bias_spread: Tensor | None,
    second: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """Independent weights: `var = m² * V + v_b + v * (W² + V)`, the last kernel precomputed."""
    m = mean_of(x)
    own = in_full_precision(_own, m, spread, bias_spread, settings)
    return Gaussian.diagonal(convolve(m, weight, bias, settings), _with_input(own, x, second, settings))


def convolution_rotated(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rotation: Tensor,
    mixing: Tensor,
    bias_spread: Tensor | None,
    second: Tensor | None,
    settings: Settings,
) -> Gaussian:
    """Kronecker posterior: `var_o = Σ_q D_oq (Q_Aᵀ m_l)²_q + v_b + v * (W² + V)`, `D_oq = Σ_p (Q_B)²_op G_pq`.

    `Q_Aᵀ m_l` at all places is a convolution with the eigenvectors as kernels: no patch is ever unfolded.
    """
    m = mean_of(x)
    own = in_full_precision(_rotated, m, rotation, mixing, bias_spread, settings)
    return Gaussian.diagonal(convolve(m, weight, bias, settings), _with_input(own, x, second, settings))


def convolution_rooted(
    x: Gaussian | Tensor,
    weight: Tensor,
    bias: Tensor | None,
    roots: Tensor,
    offsets: Tensor | None,
    second: Tensor | None,
    settings: Settings,
    spread: Tensor | None = None,
    bias_spread: Tensor | None = None,
) -> Gaussian:
    """Any joint posterior: `var_o = Σ_r (R_or * m + ρ_or)² + v * (W² + V)`.

    `(R_or, ρ_or)` are the columns of a root of the joint covariance of `(W_o, b_o)`: a sum of squares, never negative.
    They may be few, with a `spread` of independent weights beside them.
    """
    m = mean_of(x)
    mean = convolve(m, weight, bias, settings)
    squares = _spread(m, roots, offsets, settings).square()
    own = squares.unflatten(1, (mean.shape[1], -1)).sum(2)
    if spread is not None:
        own = own + in_full_precision(_own, m, spread, bias_spread, settings)
    return Gaussian.diagonal(mean, _with_input(own, x, second, settings))


def convolution_of_values(
    x: Gaussian | Tensor, weight: Gaussian | Tensor, bias: Gaussian | Tensor | None, settings: Settings
) -> Gaussian:
    """A weight that the model computes: `var = m² * V + v * (W² + V) + v_b`, all operands taken as independent."""
    w, b = mean_of(weight), None if bias is None else mean_of(bias)
    mean = convolve(mean_of(x), w, b, settings)
    if isinstance(x, Gaussian) and isinstance(weight, Tensor) and not isinstance(bias, Gaussian):
        return x.mapped(mean, lambda t: convolve(t, w, None, settings), lambda v: _spread(v, w * w, None, settings))
    spread = torch.zeros_like(w) if isinstance(weight, Tensor) else weight.variance
    bias_spread = bias.variance if isinstance(bias, Gaussian) else None
    own = in_full_precision(_own, mean_of(x), spread, bias_spread, settings)
    return Gaussian.diagonal(mean, _with_input(own, x, w.square() + spread, settings))


def _with_input(own: Tensor, x: Gaussian | Tensor, second: Tensor | None, settings: Settings) -> Tensor:
    """Add what the input variances contribute through the second moment of the weight: `own + v * E[W²]`."""
    if isinstance(x, Tensor):
        return own
    assert second is not None
    return own + _spread(x.variance, second, None, settings)


def _own(m: Tensor, spread: Tensor, bias_spread: Tensor | None, settings: Settings) -> Tensor:
    return convolve(m * m, spread, bias_spread, settings)


def _rotated(m: Tensor, rotation: Tensor, mixing: Tensor, bias_spread: Tensor | None, settings: Settings) -> Tensor:
    flat, none = [1] * (m.dim() - 2), [0] * (m.dim() - 2)
    squares = convolve(m, rotation, None, settings).square()
    return torch.convolution(squares, mixing, bias_spread, flat, none, flat, False, none, settings[-1])


def _spread(values: Tensor, kernels: Tensor, offsets: Tensor | None, settings: Settings) -> Tensor:
    return in_full_precision(convolve, values, kernels, offsets, settings)


# -- builders


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
    return _full(site, x, w, b, layout) if site.options.full else _diagonal(site, x, w, b, layout)


def _diagonal(site: Site, x: Any, w: Weight, b: Weight | None, layout: Layout) -> Built:
    weight = _kernel(w.tensor, layout)
    bias = None if b is None else b.tensor.clone()
    names, posterior, settings = (w.name, b and b.name), site.posterior, layout.settings
    note = describe(*names, site.is_random(x), "exact variances, correlation between places dropped")
    note += f"; {SHARED}" if any(names) else ""
    if posterior is None or not any(names):
        return Built(convolution_fixed_weight, (x, weight, bias, weight.square(), settings), note)
    spread = None if w.name is None else _kernel(posterior.variance(w.name).reshape(weight.shape), layout)
    bias_spread = None if names[1] is None else posterior.variance(names[1]).flatten()
    second = None if not site.is_random(x) else weight.square() if spread is None else weight.square() + spread
    if w.name is None:
        return Built(convolution_random_bias, (x, weight, bias, bias_spread, second, settings), note)
    without_directions = isinstance(posterior, LowRankPosterior) and posterior.rank == 0
    if isinstance(posterior, DiagonalPosterior) or without_directions:
        return Built(convolution_independent, (x, weight, bias, spread, bias_spread, second, settings), note)
    factors = _factors(posterior, w.name, layout)
    if factors is not None:
        assert factors.right is not None
        rotation = _kernel(layout.kernels(factors.right.mT.repeat(layout.groups, 1)), layout)
        mixing = (factors.left.square() @ factors.variance).reshape(*factors.variance.shape, *[1] * (weight.dim() - 2))
        return Built(convolution_rotated, (x, weight, bias, rotation, mixing, bias_spread, second, settings), note)
    if isinstance(posterior, LowRankPosterior):
        apart = [None if n is None else posterior.own_variance(n) for n in names]
        assert apart[0] is not None
        roots, offsets = _directions(posterior, w.name, names[1], layout)
        inputs = (x, weight, bias, _kernel(roots, layout), offsets, second, settings)
        return Built(convolution_rooted, (*inputs, _kernel(apart[0], layout), apart[1]), note)
    roots, offsets = _roots(*_joint(posterior, w.name, names[1], layout), layout)
    return Built(convolution_rooted, (x, weight, bias, _kernel(roots, layout), offsets, second, settings), note)


def _kernel(tensor: Tensor, layout: Layout) -> Tensor:
    """A copy, since the network must not change when the model is trained on, in the order that is fastest on a CPU.

    Kernels stored channels last make the op compute, and return, its images so: less time for large images, such as
    those of a ResNet, and a little more for tiny ones. Double precision and convolutions in groups gain nothing.
    """
    last = tensor.dim() == 4 and layout.groups == 1 and tensor.dtype != torch.float64
    return tensor.clone(memory_format=torch.channels_last if last else torch.contiguous_format)


def _full(site: Site, x: Any, w: Weight, b: Weight | None, layout: Layout) -> Built:
    weight = w.tensor.clone(memory_format=torch.contiguous_format)
    bias = None if b is None else b.tensor.clone()
    names, posterior, shape = (w.name, b and b.name), site.posterior, site.shape(x)
    frames = shape[0] * site.positions(x) // shape[:-1].numel()  # images of one sample that lie in the batch dimension
    _require_memory(posterior, names[0], layout, shape[1:], frames, site.is_random(x), weight)
    note = describe(*names, site.is_random(x), "exact moments")
    if posterior is None or not any(names):
        return Built(convolution_fixed_weight, (x, weight, bias, weight.square(), layout.settings), note)
    noise = _places_noise(posterior, *names, layout, shape[1:])
    index = layout.index(shape[1:], frames).to(weight.device)
    return Built(FullConvolution(weight, bias, noise, index, frames, layout.settings), (x,), note)


def _places_noise(
    posterior: Posterior, weight: str | None, bias: str | None, layout: Layout, entry: torch.Size
) -> nn.Module:
    blocks = (layout.groups, layout.out // layout.groups, layout.width)
    if weight is None:
        assert bias is not None
        return BiasNoise(posterior.covariance(bias))
    if isinstance(posterior, DiagonalPosterior):
        spread = layout.rows(posterior.variance(weight)).reshape(blocks).clone()
        return IndependentNoise(spread, None if bias is None else posterior.variance(bias).clone())
    factors = _factors(posterior, weight, layout)
    if factors is not None:
        return KroneckerPlaces(factors, None if bias is None else posterior.covariance(bias), layout, entry)
    ww, wb, bb = _joint(posterior, weight, bias, layout)
    return JointNoise(ww.reshape(*blocks, *blocks), None if wb is None else wb.reshape(*blocks, -1), bb)


def _factors(posterior: Posterior, name: str, layout: Layout) -> Eigenfactors | None:
    """Kronecker factors that split the weight into outputs and patches; None if there are no such factors."""
    if not isinstance(posterior, KroneckerPosterior) or layout.transposed:
        return None
    factors = posterior._factors[name]
    return None if factors.right is None else factors.map(lambda t: t.clone())


def _joint(
    posterior: Posterior, weight: str, bias: str | None, layout: Layout
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Covariance of the weight `[out, P, out, P]`, of weight and bias `[out, P, out]`, of the bias `[out, out]`."""
    kept = posterior.select(*(glob.escape(n) for n in (weight, bias) if n is not None))
    size = layout.shape.numel() + (0 if bias is None else layout.out)
    dtype, device = posterior.dtype, posterior.variance(weight).device
    _refuse(
        3 * size**2 * dtype.itemsize,
        f"the joint covariance of the {size} parameters of '{weight}'",
        "use a diagonal posterior, or leave this parameter out with posterior.select(...)",
        device,
    )
    dense = kept.to_dense()
    offset = 0 if bias is None or kept.names[0] == weight else layout.out
    at = layout.rows(torch.arange(layout.shape.numel(), device=device)) + offset  # [out, P]
    ww = dense[at[:, :, None, None], at]
    if bias is None:
        return ww, None, None
    biases = torch.arange(layout.out, device=device) + (layout.shape.numel() if offset == 0 else 0)
    return ww, dense[at.unsqueeze(-1), biases], dense[biases.unsqueeze(-1), biases]


def _roots(ww: Tensor, wb: Tensor | None, bb: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Kernels, `P` or `P + 1` per output, and their offsets: the columns of a root of the covariance of `(W_o, b_o)`"""
    blocks = ww.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [out, P, P]
    if wb is not None and bb is not None:
        cross = wb.diagonal(dim1=0, dim2=2).mT.unsqueeze(-1)  # [out, P, 1]
        last = torch.cat([cross.mT, bb.diagonal()[:, None, None]], dim=2)
        blocks = torch.cat([torch.cat([blocks, cross], dim=2), last], dim=1)
    columns = symmetric_root(blocks.double()).mT.flatten(0, 1).to(ww.dtype)  # [out * columns, P or P + 1]
    kernels = layout.kernels(columns[:, : layout.width].contiguous())
    return kernels, None if bb is None else columns[:, -1].contiguous()


def _directions(
    posterior: LowRankPosterior, weight: str, bias: str | None, layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """The directions of a low-rank posterior as `_roots` gives its columns."""
    rows = torch.stack([layout.rows(d) for d in posterior.directions(weight)], dim=1)  # [out, K, P]
    offsets = None if bias is None else posterior.directions(bias).mT.flatten()
    return layout.kernels(rows.flatten(0, 1).contiguous()), offsets


def _require_memory(
    posterior: Posterior | None,
    name: str | None,
    layout: Layout,
    entry: torch.Size,
    frames: int,
    random_input: bool,
    weight: Tensor,
) -> None:
    """Refuse a map whose joint covariance cannot fit, from the sizes of one sample."""
    probe = torch.empty((1, *entry), device="meta")
    result = convolve(probe, torch.empty(layout.shape, device="meta"), None, layout.settings).shape[1:]
    inputs, outputs = frames * entry.numel(), frames * result.numel()
    places, patch = frames * result[1:].numel(), layout.groups * layout.width
    numbers = 3 * outputs**2 + (inputs * (inputs + outputs) if random_input else 0)
    if name is not None and random_input:
        if isinstance(posterior, DiagonalPosterior):
            numbers += places**2 * patch
        elif isinstance(posterior, KroneckerPosterior) and not layout.transposed:
            numbers += 2 * inputs * places * patch + 2 * layout.groups * places**2 * patch
        else:
            numbers += 2 * (places * patch) ** 2
    shape = " x ".join(map(str, result))
    _refuse(
        numbers * weight.element_size(),
        f"the joint covariance of the {shape} outputs of a convolution (kernel {tuple(layout.shape)})",
        "use covariance='diagonal', or make only parameters random that come after the large maps",
        weight.device,
    )


def _refuse(needed: int, what: str, remedy: str, device: torch.device) -> None:
    try:
        require_memory(needed, what, device)
    except InputError:
        raise InputError(
            f"{what} needs about {needed / 1e9:.3g} GB for a single sample, more than this machine has: {remedy}"
        ) from None
