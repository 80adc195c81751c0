"""Convolutions in the full structure: the noise between all pairs of places, `[B, out, L, out, L]`.

The formulas are in convolution.py; here they are for each structure of the posterior.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propagauss.gaussian import Gaussian, mean_of
from propagauss.posteriors.kronecker import Eigenfactors
from propagauss.rules.images.patches import Layout, Settings, convolve


class FullConvolution(nn.Module):
    """Full: `C' = W C Wᵀ + noise`, joint over channels and places, and over the frames that make up one sample."""

    weight: Tensor
    bias: Tensor | None
    index: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor | None, noise: nn.Module, index: Tensor, frames: int, settings: Settings
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("index", index)  # [frames * L, G, P]
        self.noise, self.frames, self.settings = noise, frames, settings

    def forward(self, x: Gaussian | Tensor) -> Gaussian:
        m = mean_of(x)
        mean = convolve(m, self.weight, self.bias, self.settings)
        batch, (out, *_) = mean.shape[0] // self.frames, mean.shape[1:]
        flat = m.reshape(batch, self.frames * torch.Size(m.shape[1:]).numel())
        patches = F.pad(flat, (1, 0))[:, self.index]  # [B, frames * L, G, P]
        noise = self.noise(patches, None if isinstance(x, Tensor) else x.covariance, self.index)
        split = noise.reshape(batch, *2 * (out, self.frames, patches.shape[1] // self.frames))
        size = out * patches.shape[1]
        joint = split.permute(0, 2, 1, 3, 5, 4, 6).reshape(batch, size, size)
        if isinstance(x, Gaussian):
            carried = x.mapped(mean, lambda t: convolve(t, self.weight, None, self.settings))
            joint = joint + carried.covariance.reshape(joint.shape)
        return Gaussian.full(mean, joint)


class BiasNoise(nn.Module):
    """`noise = Cov(b_o, b_k)`, the same for every pair of places."""

    bias: Tensor

    def __init__(self, bias: Tensor):
        super().__init__()
        self.register_buffer("bias", bias)  # [out, out]

    def forward(self, patches: Tensor, c: Tensor | None, index: Tensor) -> Tensor:
        batch, places, (out, _) = patches.shape[0], patches.shape[1], self.bias.shape
        return self.bias[:, None, :, None].expand(batch, out, places, out, places)


class IndependentNoise(nn.Module):
    """`noise = δ_ok (Σ_p S_lp,mp V_op + v_o)`"""

    weight_variance: Tensor
    bias: Tensor | None

    def __init__(self, weight_variance: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight_variance", weight_variance)  # [G, out / G, P]
        self.register_buffer("bias", bias)  # [out]

    def forward(self, patches: Tensor, c: Tensor | None, index: Tensor) -> Tensor:
        """`patches: [B, L, G, P]`, `c: [B, n, n]`, `index: [L, G, P]`"""
        half = torch.einsum("blgp,gop->bgolp", patches, self.weight_variance)
        noise = torch.einsum("bgolp,bmgp->bgolm", half, patches)
        if c is not None:
            at = index.transpose(0, 1)
            pairs = F.pad(c, (1, 0, 1, 0))[:, at.unsqueeze(2), at.unsqueeze(1)]  # [B, G, L, L, P]
            noise = noise + torch.einsum("bglmp,gop->bgolm", pairs, self.weight_variance)
        noise = noise.flatten(1, 2).permute(0, 2, 3, 1)  # [B, L, L, out]
        noise = noise if self.bias is None else noise + self.bias
        return torch.diag_embed(noise).permute(0, 3, 1, 4, 2)


class KroneckerPlaces(nn.Module):
    """`noise = Q_B diag(t_lm) Q_Bᵀ + Cov(b)`, `t = G s`, `s_q = (Q_Aᵀ S_lm Q_A)_qq`.

    `diag(Q_Aᵀ C Q_A)` is two convolutions with the eigenvectors as kernels, one per side of `C`; in the second each
    kernel meets only its own partner from the first.
    """

    left: Tensor
    right: Tensor
    variance: Tensor
    bias: Tensor | None
    first: Tensor
    second: Tensor

    def __init__(self, factors: Eigenfactors, bias: Tensor | None, layout: Layout, entry: torch.Size):
        super().__init__()
        assert factors.right is not None
        self.register_buffer("left", factors.left.unflatten(0, (layout.groups, -1)))  # [G, out / G, out]
        self.register_buffer("right", factors.right)  # [P, P]
        self.register_buffer("variance", factors.variance)  # [out, P]
        self.register_buffer("bias", bias)  # [out, out]
        vectors = factors.right.mT
        self.register_buffer("first", layout.kernels(vectors.repeat(layout.groups, 1)))  # group by group
        self.register_buffer("second", layout.kernels(vectors.repeat_interleave(layout.groups, 0)))  # vector by vector
        self.entry, self.settings = entry, layout.settings

    def forward(self, patches: Tensor, c: Tensor | None, index: Tensor) -> Tensor:
        """`patches: [B, L, G, P]`, `c: [B, n, n]`"""
        rotated = patches @ self.right
        s = torch.einsum("blgq,bmhq->bglqhm", rotated, rotated)
        s = s if c is None else s + self._both_sides(c, patches.shape[1])
        t = torch.einsum("bglqhm,pq->bglhmp", s, self.variance)
        half = torch.einsum("bglhmp,gop->bgolhmp", t, self.left)
        noise = torch.einsum("bgolhmp,hkp->bgolhkm", half, self.left).flatten(4, 5).flatten(1, 2)
        return noise if self.bias is None else noise + self.bias[:, None, :, None]

    def _both_sides(self, c: Tensor, places: int) -> Tensor:
        """`[B, n, n] -> [B, G, L, P, G, L]`"""
        (batch, n, _), (groups, width) = c.shape, (self.settings[-1], len(self.right))
        frames, rows = n // self.entry.numel(), batch * groups * places
        half = convolve(c.reshape(batch * n * frames, *self.entry), self.first, None, self.settings)
        half = half.reshape(batch, n, frames, groups, width, places // frames).permute(0, 3, 2, 5, 4, 1)
        half = half.reshape(rows, width, frames, *self.entry).transpose(1, 2)
        half = half.reshape(rows * frames, width * self.entry[0], *self.entry[1:])
        whole = convolve(half, self.second, None, (*self.settings[:-1], width * groups))
        whole = whole.reshape(batch, groups, places, frames, width, groups, places // frames)
        return whole.permute(0, 1, 2, 4, 5, 3, 6).flatten(5)


class JointNoise(nn.Module):
    """The sums in general: `Σ_pq S_lp,mq Cov(W_op, W_kq)` and the terms of the bias."""

    weight: Tensor
    cross: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, cross: Tensor | None, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)  # [G, out / G, P, G, out / G, P]
        self.register_buffer("cross", cross)  # [G, out / G, P, out], weight against bias
        self.register_buffer("bias", bias)  # [out, out]

    def forward(self, patches: Tensor, c: Tensor | None, index: Tensor) -> Tensor:
        """`patches: [B, L, G, P]`, `c: [B, n, n]`, `index: [L, G, P]`"""
        half = torch.einsum("blgp,gophkq->bgolhkq", patches, self.weight)
        noise = torch.einsum("bgolhkq,bmhq->bgolhkm", half, patches)
        if c is not None:
            pairs = F.pad(c, (1, 0, 1, 0))[:, index[:, :, :, None, None, None], index]  # [B, L, G, P, L, G, P]
            noise = noise + torch.einsum("blgpmhq,gophkq->bgolhkm", pairs, self.weight)
        noise = noise.flatten(4, 5).flatten(1, 2)
        if self.cross is not None:
            here = torch.einsum("blgp,gopk->bgolk", patches, self.cross).flatten(1, 2)  # [B, out, L, out]
            noise = noise + here.unsqueeze(-1) + here.permute(0, 3, 1, 2).unsqueeze(2)
        return noise if self.bias is None else noise + self.bias[:, None, :, None]
