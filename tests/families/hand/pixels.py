"""Convolutional networks that answer for every pixel, for boxes, for motion: segmentation, detection, flow, video."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, vectors
from families.hand.vision import around, conv, image

FAMILIES = Register("vision")


@FAMILIES("U-Net")
def unet() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        a = torch.relu(self.a(x))
        b = torch.relu(self.b(F.max_pool2d(a, 2)))
        c = torch.relu(self.c(torch.cat([self.up(b), a], 1)))
        return self.head(c)

    parts = {
        "a": conv(3, 4),
        "b": conv(4, 8),
        "up": nn.ConvTranspose2d(8, 4, 2, 2),
        "c": conv(8, 4),
        "head": conv(4, 2, 1),
    }
    return Lambda(forward, **parts), image()


@FAMILIES("attention U-Net")
def attention_unet() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        a = torch.relu(self.a(x))
        g = F.interpolate(torch.relu(self.b(F.max_pool2d(a, 2))), scale_factor=2.0, mode="bilinear")
        return self.head(torch.cat([a * torch.sigmoid(self.psi(torch.relu(self.wa(a) + self.wg(g)))), g], 1))

    parts = {"a": conv(3, 4), "b": conv(4, 4), "wa": conv(4, 4, 1), "wg": conv(4, 4, 1), "psi": conv(4, 1, 1)}
    return Lambda(forward, **parts, head=conv(8, 2, 1)), image()


@FAMILIES("V-Net, three dimensions")
def vnet() -> Built:
    layers = [nn.Conv3d(1, 4, 3, padding=1), nn.PReLU(4), nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 2, 1)]
    return nn.Sequential(*layers), (vectors(1, 4, 4, 4),)


@FAMILIES("dilated pyramid (ASPP)")
def aspp() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        whole = F.interpolate(x.mean((-2, -1), keepdim=True), size=x.shape[-2:], mode="bilinear")
        return torch.relu(self.mix(torch.cat([*(b(x) for b in self.branches), whole], 1)))

    branches = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=d, dilation=d) for d in (1, 2, 3))
    return around(block, branches=branches, mix=conv(20, 8, 1))


@FAMILIES("pyramid pooling (PSPNet)")
def psp() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        parts = [
            F.interpolate(c(F.adaptive_avg_pool2d(x, s)), size=(8, 8))
            for s, c in zip((1, 2, 3), self.convs, strict=True)
        ]
        return self.mix(torch.cat([x, *parts], 1))

    return around(block, convs=nn.ModuleList(conv(8, 4, 1) for _ in range(3)), mix=conv(20, 8, 1))


@FAMILIES("feature pyramid")
def fpn() -> Built:
    def block(self: nn.Module, x: Tensor) -> Tensor:
        low = self.down(x)
        return self.lateral(x) + F.interpolate(low, scale_factor=2.0, mode="nearest")

    return around(block, down=nn.Conv2d(8, 8, 3, 2, 1), lateral=conv(8, 8, 1))


@FAMILIES("sub-pixel super-resolution (ESPCN)")
def espcn() -> Built:
    return nn.Sequential(conv(3, 8), nn.Tanh(), conv(8, 12), nn.PixelShuffle(2)), image()


@FAMILIES("video, (2+1)-d convolution")
def video() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.time(torch.relu(self.space(x)))).mean((-3, -2, -1)))

    parts = {
        "space": nn.Conv3d(2, 6, (1, 3, 3), padding=(0, 1, 1)),
        "time": nn.Conv3d(6, 6, (3, 1, 1), padding=(1, 0, 0)),
    }
    return Lambda(forward, **parts, head=nn.Linear(6, 2)), (torch.randn(BATCH, 2, 4, 6, 6),)


@FAMILIES("YOLO head, decoded boxes")
def yolo() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = self.head(F.silu(self.stem(x))).permute(0, 2, 3, 1)
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        centre = (h[..., :2].sigmoid() + torch.stack([columns, rows], -1)) * 2
        return torch.cat([centre, h[..., 2:4].exp() * 3, h[..., 4:].sigmoid()], -1).flatten(1, 2)

    return Lambda(forward, stem=nn.Conv2d(3, 8, 3, 2, 1), head=conv(8, 7, 1)), image()


@FAMILIES("soft arg max of heat maps")
def heat_map() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        p = self.head(torch.relu(self.stem(x))).flatten(2).softmax(-1).unflatten(-1, (8, 8))
        place = torch.linspace(-1, 1, 8)
        return torch.stack([(p.sum(-2) * place).sum(-1), (p.sum(-1) * place).sum(-1)], -1)

    return Lambda(forward, stem=conv(3, 8), head=conv(8, 2, 1)), image()


@FAMILIES("optical flow, correlation volume")
def correlation() -> Built:
    def forward(self: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        u, v = self.stem(a), F.pad(self.stem(b), (1, 1, 1, 1))
        volume = [(u * v[..., i : i + 8, j : j + 8]).mean(1) for i in range(3) for j in range(3)]
        return self.head(torch.relu(torch.stack(volume, 1)))

    return Lambda(forward, stem=conv(3, 4), head=conv(9, 2)), (vectors(3, 8, 8), vectors(3, 8, 8))


@FAMILIES("stereo, soft disparity")
def stereo() -> Built:
    def forward(self: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        u, v = self.stem(a), self.stem(b)
        cost = torch.stack([(u * torch.roll(v, d, -1)).sum(1) for d in range(4)], 1)
        return (cost.softmax(1) * torch.arange(4.0).view(1, 4, 1, 1)).sum(1)

    return Lambda(forward, stem=conv(3, 4)), (vectors(3, 8, 8), vectors(3, 8, 8))


@FAMILIES("neural cellular automaton")
def automaton() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 0.3 * self.second(torch.relu(self.first(x)))
        return x

    return Lambda(forward, first=conv(3, 8), second=conv(8, 3, 1)), image()
