"""Linear layers: `h = W a + b` with random weights, a random input, or both.

With `a` of mean `m` and covariance `C`:  mean `E[W] m + E[b]`,  covariance `E[W] C E[W]ᵀ + noise(m, C)`, where the
posterior answers `noise` (`posterior.base.Noise`). Exact for the first two moments whenever `a` is independent of `W, b`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.gaussian import Gaussian
from propagauss.posterior.base import Noise
from propagauss.rules.registry import Built, Site, builder, rule

aten = torch.ops.aten


class Linear(nn.Module):
    """Diagonal: `var = noise(m) + v (W² + V)ᵀ` with `V` the marginal variances of the weight.

    The second matrix is precomputed, so a random layer costs three products of the size of its own with a random input
    and two with a deterministic one.
    """

    weight: Tensor
    bias: Tensor | None
    second: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, noise: Noise | None, random_input: bool):
        super().__init__()
        self.register_buffer("weight", weight.clone(memory_format=torch.contiguous_format))  # [out, in]
        self.register_buffer("bias", None if bias is None else bias.clone())
        self.noise = noise
        second = None
        if random_input:
            spread = None if noise is None else noise.weight_variance()
            second = weight.square() if spread is None else weight.square() + spread
        self.register_buffer("second", second)

    def forward(self, x: Gaussian | Tensor) -> Gaussian:
        if isinstance(x, Tensor):
            assert self.noise is not None
            return Gaussian.diagonal(F.linear(x, self.weight, self.bias), self.noise.variance(x))
        mean = F.linear(x.mean, self.weight, self.bias)
        assert self.second is not None
        if self.noise is None:
            return Gaussian.diagonal(mean, F.linear(x.variance, self.second))
        return Gaussian.diagonal(mean, _accumulate(self.noise.variance(x.mean), x.variance, self.second))


class FullLinear(nn.Module):
    """Full: `C' = W C Wᵀ + noise(m, C)`, joint over all positions that share the weight."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, noise: Noise | None, positions: int):
        super().__init__()
        self.register_buffer("weight", weight.clone(memory_format=torch.contiguous_format))  # [out, in]
        self.register_buffer("bias", None if bias is None else bias.clone())
        self.noise = noise
        self.positions = positions

    def forward(self, x: Gaussian | Tensor) -> Gaussian:
        m = x if isinstance(x, Tensor) else x.mean
        mean = F.linear(m, self.weight, self.bias)
        out, inputs = self.weight.shape
        t = self.positions
        c = None if isinstance(x, Tensor) else x.covariance.reshape(-1, t, inputs, t, inputs).transpose(2, 3)
        spread = None if self.noise is None else self.noise.covariance(m.reshape(-1, t, inputs), c)
        if c is not None:
            carried = self.weight @ c @ self.weight.mT  # [B, T, T, out, out]
            spread = carried if spread is None else spread + carried
        assert spread is not None
        return Gaussian.full(mean, spread.transpose(2, 3).reshape(-1, t * out, t * out))


def _accumulate(start: Tensor, v: Tensor, matrix: Tensor) -> Tensor:
    """`start + v @ matrix.T`, as one accumulating product where the shapes allow it."""
    if v.dim() == 2:
        return torch.addmm(start, v, matrix.t())
    return start + F.linear(v, matrix)


@builder(aten.linear.default)
def build_linear(site: Site) -> Built | None:
    x, weight, *rest = site.args
    return linear_layer(site, x, weight, rest[0] if rest else None, flipped=False)


@builder(aten.addmm.default)
def build_addmm(site: Site) -> Built | None:
    if site.kwargs.get("beta", 1) != 1 or site.kwargs.get("alpha", 1) != 1:
        return None
    bias, x, weight = site.args
    return linear_layer(site, x, weight, bias, flipped=True)


@builder(aten.mm.default, aten.matmul.default)
def build_matmul(site: Site) -> Built | None:
    x, weight = site.args
    return linear_layer(site, x, weight, None, flipped=True)


def linear_layer(site: Site, x: Any, weight: Any, bias: Any, flipped: bool) -> Built | None:
    """A layer with a stored weight; `flipped` if the op multiplies by `weight` rather than by its transpose."""
    w = site.weight(weight)
    b = None if bias is None else site.weight(bias)
    if w is None or w.tensor.dim() != 2 or (bias is not None and (b is None or b.tensor.dim() != 1)):
        return None
    if len(site.shape(x)) < (2 if site.options.full else 1):
        return None
    names = (w.name, b and b.name)
    noise = None
    if any(names):
        assert site.posterior is not None
        noise = site.posterior.noise(*names, transposed=w.transposed != flipped)
    matrix = w.tensor.t() if flipped else w.tensor
    offset = None if b is None else b.tensor
    random_input = site.is_random(x)
    if site.options.full:
        module: nn.Module = FullLinear(matrix, offset, noise, site.positions(x))
    else:
        module = Linear(matrix, offset, noise, random_input)
    return Built(module, (x,), _describe(w.name, b and b.name, random_input))


def _describe(weight: str | None, bias: str | None, random_input: bool) -> str:
    random = " and ".join(n for n, on in (("weight", weight), ("bias", bias)) if on) or "fixed"
    return f"{random} {'on a random input' if random_input else 'on a fixed input'}: exact moments"


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, note="factors taken as independent: exact moments")
def matmul(a: Gaussian | Tensor, b: Gaussian | Tensor) -> Gaussian:
    """`var(ab) = m_a² v_b + v_a m_b² + v_a v_b` with matrix products; the plain matrix product if one side is fixed."""
    if isinstance(b, Tensor):
        assert isinstance(a, Gaussian)
        return a.mapped(a.mean @ b, lambda t: t @ b, lambda t: t @ b.square())
    if isinstance(a, Tensor):
        return b.mapped(a @ b.mean, lambda t: a @ t, lambda t: a.square() @ t)
    mean = a.mean @ b.mean
    if not a.is_full and not b.is_full:
        return Gaussian.diagonal(mean, a.mean.square() @ b.variance + a.variance @ (b.mean.square() + b.variance))
    return Gaussian.full(mean, _matmul_covariance(a, b))


def _matmul_covariance(a: Gaussian, b: Gaussian) -> Tensor:
    """Covariance of a product of independent `[B, I, K]` and `[B, K, J]`: `[B, I*J, I*J]`.

    `b` may be `[K, J]`, the same for every sample.
    """
    i, k = a.mean.shape[-2:] if a.mean.dim() > 2 else (1, a.mean.shape[-1])
    j = b.mean.shape[-1]
    ca = a.covariance.reshape(-1, i, k, i, k)
    cb = b.covariance.reshape(-1, k, j, k, j)
    ma, mb = a.mean.reshape(-1, i, k), b.mean.reshape(-1, k, j)
    second = ca + ma[:, :, :, None, None] * ma[:, None, None, :, :]
    noise = torch.einsum("bikml,ckjln->bijmn" if cb.shape[0] == 1 else "bikml,bkjln->bijmn", second, cb)
    left = torch.einsum("bikml,bkj,bln->bijmn", ca, *2 * (mb.expand(ca.shape[0], -1, -1),))
    return (noise + left).reshape(-1, i * j, i * j)


@rule(aten.addmm.default, note="factors taken as independent: exact moments")
def addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Gaussian:
    from propagauss.rules.arithmetic import add, multiply

    product = matmul(a, b)
    product = product if alpha == 1 else multiply(product, alpha)
    scaled = bias * beta if isinstance(bias, Tensor) else multiply(bias, beta)
    return add(product, scaled)
