"""Density models and latent variables: couplings, decoders, diffusion, energy, kernels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import Lambda, Register, mlp, vectors

FAMILIES = Register("generative")
WIDTH = 8


class Coupling(nn.Module):
    """One half moves the other: added (NICE), or scaled and shifted (RealNVP)."""

    def __init__(self, scaled: bool):
        super().__init__()
        self.net, self.scaled = mlp(4, 16, 8 if scaled else 4, activation=nn.Tanh), scaled

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        if not self.scaled:
            return torch.cat([b + self.net(a), a], -1)
        s, t = self.net(a).chunk(2, -1)
        return torch.cat([b * torch.exp(torch.tanh(s)) + t, a], -1)


FAMILIES("flow, additive coupling (NICE)")(lambda: (nn.Sequential(Coupling(False), Coupling(False)), (vectors(WIDTH),)))
FAMILIES("flow, affine coupling (RealNVP)")(lambda: (nn.Sequential(Coupling(True), Coupling(True)), (vectors(WIDTH),)))


@FAMILIES("flow, log density")
def log_density() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        total = 0.0
        for net in self.nets:
            a, b = x.chunk(2, -1)
            s, t = net(a).chunk(2, -1)
            s = torch.tanh(s)
            x, total = torch.cat([b * s.exp() + t, a], -1), total + s.sum(-1)
        return total - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)

    return Lambda(forward, nets=nn.ModuleList(mlp(4, 16, 8) for _ in range(2))), (vectors(WIDTH),)


@FAMILIES("flow, invertible 1x1 convolution (Glow)")
def glow() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = F.conv2d((x + self.shift) * self.gain.exp(), self.weight[..., None, None])
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        y = torch.cat([a, (b + t) * torch.sigmoid(s + 2)], 1)
        return torch.cat([y.flatten(1), torch.linalg.slogdet(self.weight)[1].expand(y.shape[0], 1)], 1)

    weights = {"shift": nn.Parameter(torch.randn(1, 4, 1, 1)), "gain": nn.Parameter(torch.randn(1, 4, 1, 1) / 4)}
    net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    return Lambda(forward, **weights, weight=nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0]), net=net), (
        vectors(4, 4, 4),
    )


@FAMILIES("flow, rational-quadratic spline")
def spline() -> Built:
    """Bins by searchsorted and gather."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        w, h = self.net(a).unflatten(-1, (4, 2, 5)).softmax(-1).unbind(-2)
        xs, ys = F.pad(w.cumsum(-1), (1, 0)), F.pad(h.cumsum(-1), (1, 0))
        u = b.sigmoid() * 0.98 + 0.01
        index = torch.searchsorted(xs, u[..., None]).clamp(1, 5)
        x0, x1 = xs.gather(-1, index - 1), xs.gather(-1, index)
        y0, y1 = ys.gather(-1, index - 1), ys.gather(-1, index)
        return torch.cat([a, (y0 + (y1 - y0) * (u[..., None] - x0) / (x1 - x0)).squeeze(-1)], -1)

    return Lambda(forward, net=mlp(4, 16, 40)), (vectors(WIDTH),)


class Masked(nn.Linear):
    """MADE: a linear layer with a fixed mask."""

    def __init__(self, inside: int, outside: int):
        super().__init__(inside, outside)
        self.register_buffer("mask", torch.tril(torch.ones(outside, inside)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


FAMILIES("masked autoregressive (MADE)")(
    lambda: (nn.Sequential(Masked(8, 8), nn.ReLU(), Masked(8, 8)), (vectors(WIDTH),))
)


@FAMILIES("PixelCNN")
def pixel_cnn() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(F.conv2d(x, self.first.weight * self.mask, self.first.bias, padding=1))
        return self.head(h)

    model = Lambda(forward, first=nn.Conv2d(1, 8, 3, padding=1), head=nn.Conv2d(8, 4, 1))
    model.register_buffer("mask", torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 0, 0]]))
    return model, (vectors(1, 6, 6),)


@FAMILIES("autoencoder")
def autoencoder() -> Built:
    return nn.Sequential(mlp(WIDTH, 16, 3), nn.ReLU(), mlp(3, 16, WIDTH), nn.Sigmoid()), (vectors(WIDTH),)


@FAMILIES("variational autoencoder, mean of the code")
def vae() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        mean, _ = self.encoder(x).chunk(2, -1)
        return self.decoder(mean)

    return Lambda(forward, encoder=mlp(WIDTH, 16, 6), decoder=mlp(3, 16, WIDTH)), (vectors(WIDTH),)


@FAMILIES("variational autoencoder, lower bound")
def bound() -> Built:
    def forward(self: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
        mean, log = self.encoder(x).chunk(2, -1)
        error = (self.decoder(mean + noise * (log / 2).exp()) - x).square().sum(-1)
        return error + 0.5 * (mean.square() + log.exp() - log - 1).sum(-1)

    return Lambda(forward, encoder=mlp(WIDTH, 16, 6), decoder=mlp(3, 16, WIDTH)), (vectors(WIDTH), vectors(3))


@FAMILIES("vector-quantised autoencoder (VQ-VAE)")
def vq_vae() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(-1)
        q = self.codes(nearest)
        return self.decoder(z + (q - z).detach())

    parts = {"encoder": mlp(WIDTH, 16, 4), "codes": nn.Embedding(10, 4), "decoder": mlp(4, 16, WIDTH)}
    return Lambda(forward, **parts), (vectors(WIDTH),)


@FAMILIES("finite scalar quantisation")
def fsq() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = torch.tanh(self.encoder(x)) * 3
        return self.decoder(z + (z.round() - z).detach())

    return Lambda(forward, encoder=mlp(WIDTH, 16, 4), decoder=mlp(4, 16, WIDTH)), (vectors(WIDTH),)


@FAMILIES("diffusion U-Net with a time embedding")
def diffusion() -> Built:
    def forward(self: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.exp(-torch.arange(4.0))
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1))[..., None, None]
        a = F.silu(self.norm(self.down(x)) + time)
        b = F.silu(self.middle(F.avg_pool2d(a, 2)))
        return self.up(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))

    parts = {
        "time": mlp(8, 16, 8, activation=nn.SiLU),
        "down": nn.Conv2d(2, 8, 3, padding=1),
        "norm": nn.GroupNorm(2, 8),
        "middle": nn.Conv2d(8, 8, 3, padding=1),
        "up": nn.Conv2d(16, 2, 3, padding=1),
    }
    return Lambda(forward, **parts), (vectors(2, 8, 8), torch.rand(3))


@FAMILIES("diffusion transformer (DiT, adaptive norm)")
def dit() -> Built:
    def forward(self: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        shift, scale, gate = self.modulate(F.silu(self.time(t[:, None])))[:, None].chunk(3, -1)
        h = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        x = x + gate * self.attention(h, h, h, need_weights=False)[0]
        return self.head(x)

    parts = {"time": mlp(1, 8, 8), "modulate": nn.Linear(8, 24), "head": nn.Linear(8, 8)}
    return Lambda(forward, **parts, attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True)), (
        vectors(5, WIDTH),
        torch.rand(3),
    )


@FAMILIES("style modulation (StyleGAN 2)")
def style() -> Built:
    """A kernel per sample, scaled by a style and normalised."""

    def forward(self: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        s = self.affine(w) + 1
        kernel = self.weight * s[:, None, :, None, None]
        norm = (kernel.square().sum((2, 3, 4)) + 1e-8).rsqrt()
        y = F.conv2d(x * s[..., None, None], self.weight, padding=1) * norm[..., None, None]
        return F.leaky_relu(y + self.bias, 0.2)

    weights = {"weight": nn.Parameter(torch.randn(6, 4, 3, 3) / 6), "bias": nn.Parameter(torch.zeros(6, 1, 1))}
    return Lambda(forward, affine=nn.Linear(5, 4), **weights), (vectors(4, 6, 6), vectors(5))


@FAMILIES("DCGAN generator")
def dcgan() -> Built:
    layers = [
        nn.ConvTranspose2d(WIDTH, 8, 4),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers), (vectors(WIDTH, 1, 1),)


@FAMILIES("restricted Boltzmann machine, free energy")
def rbm() -> Built:
    def forward(self: nn.Module, v: Tensor) -> Tensor:
        return -(v @ self.b) - F.softplus(v @ self.w + self.c).sum(-1)

    weights = {n: nn.Parameter(torch.randn(s)) for n, s in (("w", (8, 6)), ("b", (8,)), ("c", (6,)))}
    return Lambda(forward, **weights), (vectors(WIDTH),)


@FAMILIES("modern Hopfield network")
def hopfield() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (2.0 * x @ self.patterns.T).softmax(-1) @ self.patterns
        return x

    return Lambda(forward, patterns=nn.Parameter(torch.randn(6, WIDTH))), (vectors(WIDTH),)


@FAMILIES("mixture density network")
def mixture() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        weight, mean, log = self.net(x).chunk(3, -1)
        mean_of_all = (weight.softmax(-1) * mean).sum(-1, keepdim=True)
        return torch.cat([mean_of_all, torch.logsumexp(weight.log_softmax(-1) - log, -1, keepdim=True)], -1)

    return Lambda(forward, net=mlp(WIDTH, 16, 12)), (vectors(WIDTH),)


@FAMILIES("deep kernel learning, inducing points")
def deep_kernel() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = self.net(x)
        k = torch.exp(-torch.cdist(z, self.points).square() / 2)
        inner = torch.exp(-torch.cdist(self.points, self.points).square() / 2) + 0.1 * torch.eye(6)
        return k @ torch.cholesky_solve(self.values, torch.linalg.cholesky(inner))

    weights = {"points": nn.Parameter(torch.randn(6, 3)), "values": nn.Parameter(torch.randn(6, 1))}
    return Lambda(forward, net=mlp(WIDTH, 16, 3), **weights), (vectors(WIDTH),)
