"""Convolutional classifiers beyond those of timm: capsules, gates, deformations, pooling of many kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import Lambda, Register, mlp, vectors

FAMILIES = Register("vision")


def conv(inside: int, outside: int, kernel: int = 3, **settings: object) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, padding=kernel // 2, **settings)


def image() -> tuple[Tensor]:
    return (vectors(3, 8, 8),)


def around(block: object, **parts: object) -> Built:
    """A stem, this function of a feature map `[B, 8, 8, 8]`, global pooling and a head."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(block(self, torch.relu(self.stem(x))).mean((-2, -1)))

    return Lambda(forward, stem=conv(3, 8), **parts, head=nn.Linear(8, 2)), image()


@FAMILIES("squeeze and excitation")
def squeeze() -> Built:
    return around(lambda m, x: x * m.gate(x.mean((-2, -1))).sigmoid()[..., None, None], gate=mlp(8, 4, 8))


@FAMILIES("CBAM")
def cbam() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(self.gate(x.mean((-2, -1))) + self.gate(x.amax((-2, -1))))[..., None, None]
        return x * torch.sigmoid(self.place(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)))

    return around(block, gate=mlp(8, 4, 8), place=conv(2, 1))


@FAMILIES("efficient channel attention (ECA)")
def eca() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        return x * self.conv(x.mean((-2, -1))[:, None]).sigmoid().squeeze(1)[..., None, None]

    return around(block, conv=nn.Conv1d(1, 1, 3, padding=1))


@FAMILIES("ghost module")
def ghost() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        y = torch.relu(self.primary(x))
        return torch.cat([y, torch.relu(self.cheap(y))], 1)[:, :8]

    return around(block, primary=conv(8, 4, 1), cheap=conv(4, 4, groups=4))


@FAMILIES("shuffle unit")
def shuffle() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        y = torch.cat([a, self.branch(b)], 1)
        return y.view(y.shape[0], 2, 4, *y.shape[2:]).transpose(1, 2).reshape(y.shape)

    branch = nn.Sequential(conv(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 4, groups=4), conv(4, 4, 1))
    return around(block, branch=branch)


@FAMILIES("involution")
def involution() -> Built:
    """A kernel per place, made from the features there."""

    def block(self: nn.Module, x: Tensor) -> Tensor:
        kernel = self.kernel(x).view(x.shape[0], 1, 9, 8, 8)
        return (kernel * F.unfold(x, 3, padding=1).view(x.shape[0], 8, 9, 8, 8)).sum(2)

    return around(block, kernel=conv(8, 9, 1))


@FAMILIES("spatial transformer")
def spatial() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        theta = self.where(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(F.grid_sample(torch.relu(self.stem(x)), grid, align_corners=False).flatten(1))

    return Lambda(forward, where=mlp(192, 16, 6), stem=conv(3, 4), head=nn.Linear(256, 2)), image()


@FAMILIES("bilinear pooling")
def bilinear_pooling() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x)).flatten(2)
        g = (h @ h.transpose(1, 2) / h.shape[-1]).flatten(1)
        return self.head(F.normalize(g.sign() * (g.abs() + 1e-6).sqrt()))

    return Lambda(forward, stem=conv(3, 6), head=nn.Linear(36, 2)), image()


@FAMILIES("covariance pooling")
def covariance_pooling() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.stem(x).flatten(2)
        h = h - h.mean(-1, keepdim=True)
        return self.head(
            torch.baddbmm(torch.eye(6).expand(x.shape[0], 6, 6), h, h.transpose(1, 2), alpha=0.02).flatten(1)
        )

    return Lambda(forward, stem=conv(3, 6), head=nn.Linear(36, 2)), image()


@FAMILIES("generalised mean pooling (GeM)")
def gem() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x)).clamp(min=1e-3)
        return self.head(h.pow(self.p).mean((-2, -1)).pow(1 / self.p))

    return Lambda(forward, stem=conv(3, 6), p=nn.Parameter(torch.tensor([3.0])), head=nn.Linear(6, 2)), image()


@FAMILIES("NetVLAD")
def netvlad() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.normalize(self.stem(x), dim=1)
        weight = self.assign(h).flatten(2).softmax(1)
        gap = h.flatten(2)[:, None] - self.centres[None, :, :, None]
        return self.head(F.normalize(F.normalize((gap * weight[:, :, None]).sum(-1), dim=2).flatten(1)))

    parts = {"stem": conv(3, 6), "assign": conv(6, 4, 1), "centres": nn.Parameter(torch.randn(4, 6))}
    return Lambda(forward, **parts, head=nn.Linear(24, 2)), image()


@FAMILIES("capsules with routing")
def capsules() -> Built:
    def squash(s: Tensor) -> Tensor:
        square = s.square().sum(-1, keepdim=True)
        return square / (1 + square) * s / (square + 1e-6).sqrt()

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        u = squash(self.primary(x).flatten(2).transpose(1, 2).reshape(x.shape[0], -1, 4))
        votes = torch.einsum("bni,noij->bnoj", u, self.weight)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            v = squash((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes * v[:, None]).sum(-1)
        return v.norm(dim=-1)

    return Lambda(forward, primary=nn.Conv2d(3, 8, 4, 4), weight=nn.Parameter(torch.randn(8, 3, 4, 5) / 2)), image()


@FAMILIES("dense block")
def dense() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x.mean((-2, -1)))

    layers = [nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), conv(c, 4)) for c in (3, 7)]
    return Lambda(forward, layers=nn.ModuleList(layers), head=nn.Linear(11, 2)), image()


@FAMILIES("re-parametrised branches (RepVGG)")
def repvgg() -> Built:
    return around(
        lambda m, x: torch.relu(m.a(x) + m.b(x) + m.norm(x)), a=conv(8, 8), b=conv(8, 8, 1), norm=nn.BatchNorm2d(8)
    )


@FAMILIES("kernel attention (CondConv)")
def condconv() -> Built:
    """A kernel per sample, as a sum of experts."""

    def block(self: nn.Module, x: Tensor) -> Tensor:
        weight = torch.einsum("be,eoikl->boikl", self.route(x.mean((-2, -1))).sigmoid(), self.kernels)
        y = F.conv2d(x.reshape(1, -1, 8, 8), weight.flatten(0, 1), padding=1, groups=x.shape[0])
        return y.view(x.shape[0], 8, 8, 8)

    return around(block, route=nn.Linear(8, 3), kernels=nn.Parameter(torch.randn(3, 8, 8, 3, 3) / 8))


@FAMILIES("style by instance statistics (AdaIN)")
def adain() -> Built:
    def forward(self: nn.Module, x: Tensor, style: Tensor) -> Tensor:
        a, b = self.stem(x), self.stem(style)
        mean, sd = (f(a, (-2, -1), keepdim=True) for f in (torch.mean, torch.std))
        other, other_sd = (f(b, (-2, -1), keepdim=True) for f in (torch.mean, torch.std))
        return self.head((a - mean) / (sd + 1e-5) * other_sd + other)

    return Lambda(forward, stem=conv(3, 4), head=conv(4, 3)), (vectors(3, 8, 8), vectors(3, 8, 8))


@FAMILIES("local response norm (AlexNet)")
def alexnet() -> Built:
    layers = [conv(3, 8), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 2)]
    return nn.Sequential(*layers), image()


@FAMILIES("blur pooling, reflected padding")
def blur() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        kernel = torch.tensor([1.0, 2.0, 1.0])
        kernel = (kernel[:, None] * kernel / 16).expand(8, 1, 3, 3)
        return F.conv2d(F.pad(self.conv(x), (1, 1, 1, 1), mode="reflect"), kernel, stride=2, groups=8)

    return around(block, conv=conv(8, 8))


@FAMILIES("coordinate convolution")
def coordinates() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        y, z = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
        return self.conv(torch.cat([x, torch.stack([y, z]).expand(x.shape[0], -1, -1, -1)], 1))

    return around(block, conv=conv(10, 8))
