"""Convolutional networks as people write them, with plain torch modules at small sizes.

For each: it exports with an open batch, the mean is the model's own, and the standard deviation is compared with
sampling weights under a small posterior variance. There linearisation is exact, so what differs from one is what the
diagonal structure assumes: that the two branches of a residual sum, the places that share a weight, and the entries
that are averaged are independent. `NETWORKS` holds what was seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from exactness import STRUCTURES, difference


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Basic(nn.Module):
    """The block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(*conv(inputs, outputs, 3, stride), nn.ReLU(inplace=True), *conv(outputs, outputs))
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(*conv(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.skip(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        narrow = outputs // 4
        self.body = nn.Sequential(
            *conv(inputs, narrow, 1), nn.ReLU(inplace=True), *conv(narrow, narrow, 3, stride), nn.ReLU(inplace=True),
            *conv(narrow, outputs, 1),
        )  # fmt: skip
        self.skip = nn.Sequential(*conv(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.skip(x))


def resnet(block: Callable[[int, int, int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *conv(3, 8, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        block(8, 8, 1), block(8, 16, 2), block(16, 16, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        nn.Linear(108, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 5),
    )  # fmt: skip


class Inverted(nn.Module):
    """The block of MobileNetV2: expand, depthwise, project."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        wide = 3 * inputs
        self.body = nn.Sequential(
            *conv(inputs, wide, 1), nn.ReLU6(inplace=True), *conv(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(inplace=True), *conv(wide, outputs, 1),
        )  # fmt: skip
        self.skips = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skips else self.body(x)


def mobilenet() -> nn.Module:
    return nn.Sequential(
        *conv(3, 6, 3, 2), nn.ReLU6(inplace=True), Inverted(6, 6, 1), Inverted(6, 8, 2), *conv(8, 16, 1),
        nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5),
    )  # fmt: skip


class Permuted(nn.Module):
    """The block of ConvNeXt: depthwise 7 x 7, then channels last for the norm and the MLP, with a scale per channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand, self.project = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(0.5 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.project(F.gelu(self.expand(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelsFirstNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), ChannelsFirstNorm(8), Permuted(8),
        ChannelsFirstNorm(8), nn.Conv2d(8, 12, 2, 2), Permuted(12),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 5),
    )  # fmt: skip


class UNet(nn.Module):
    """Down, up and across: by transposed convolution, or by interpolation and a convolution."""

    def __init__(self, transposed: bool):
        super().__init__()
        self.down = nn.ModuleList([self._block(3, 6), self._block(6, 8)])
        self.middle = self._block(8, 8)
        lift = [nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 6, 2, 2)]
        blend = [nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(scale_factor=2, mode="nearest")]
        self.up = nn.ModuleList(lift if transposed else blend)
        self.join = nn.ModuleList([self._block(16, 8), self._block(12 if transposed else 14, 6)])
        self.head = nn.Conv2d(6, 2, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, other in zip(self.up, self.join, reversed(kept), strict=True):
            x = join(torch.cat([up(x), other], dim=1))
        return self.head(x)


@dataclass(frozen=True)
class Network:
    """A model, and the ratio of streamlined to sampled standard deviations (root mean square) that was seen.

    `seen` is for independent weights of one variance, `fitted` for a Kronecker-factored Laplace posterior.
    """

    name: str
    make: Callable[[], nn.Module]
    size: int
    seen: float
    fitted: float

    def __str__(self) -> str:
        return self.name

    def build(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make()
            for module in model.modules():  # statistics as after training
                if isinstance(module, nn.BatchNorm2d):
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                    nn.init.normal_(module.bias, std=0.2)
                    nn.init.normal_(module.running_mean, std=0.2)  # type: ignore[arg-type]
                    nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
            x = torch.randn(3, 3, self.size, self.size)
        return model.to(dtype).eval(), x.to(dtype)


built = cache(Network.build)  # for what differs in the posterior alone: one trace serves all of it
one_trace = pytest.mark.usefixtures("one_trace")
NETWORKS = [
    Network("ResNet-18", lambda: resnet(Basic), 32, 0.76, 0.67),
    Network("ResNet-50", lambda: resnet(Bottleneck), 32, 0.88, 0.91),
    Network("VGG", vgg, 16, 0.97, 0.97),
    Network("MobileNetV2", mobilenet, 16, 0.89, 0.82),
    Network("ConvNeXt", convnext, 32, 0.95, 1.02),
    Network("U-Net, transposed", lambda: nn.Sequential(UNet(True), nn.Flatten()), 8, 1.03, 1.04),
    Network("U-Net, interpolated", lambda: nn.Sequential(UNet(False), nn.Flatten()), 8, 1.11, 1.15),
]
EACH = pytest.mark.parametrize("network", NETWORKS, ids=str)


def independent(model: nn.Module, variance: float = 1e-6) -> pg.Posterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in model.named_parameters()})


def fitted(model: nn.Module, x: Tensor) -> pg.Posterior:
    """Kronecker factors from a few labelled images; norms and transposed convolutions stay deterministic."""
    labels = torch.arange(len(x)) % model(x).shape[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Kronecker factors exist only")
        return pg.fit_laplace(model, [(x, labels)], structure="kronecker", progress=False)


@torch.no_grad()
def sampled_variance(model: nn.Module, posterior: pg.Posterior, x: Tensor, samples: int) -> Tensor:
    mean = {n: p.detach() for n, p in model.named_parameters()}
    draws = posterior.bind(mean).sample(samples, torch.Generator().manual_seed(0))
    values = [
        torch.func.functional_call(model, {n: mean[n] + d[i] for n, d in draws.items()}, (x,)) for i in range(samples)
    ]
    return torch.stack(values).var(0)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_mean_is_the_models_and_any_batch_will_do(network: Network, dtype: torch.dtype) -> None:
    model, x = network.build(dtype)
    net = pg.streamline(model, independent(model), x[:1])
    for batch in (0, 1, 2, 3):
        g = net(x[:batch])
        torch.testing.assert_close(g.mean, model(x[:batch]).detach())
        assert g.variance.shape == g.mean.shape
        assert g.variance.isfinite().all()
        assert (g.variance > 0).all()


@EACH
@one_trace
def test_independent_weights_against_sampling(network: Network) -> None:
    model, x = built(network)
    posterior = independent(model)
    g = pg.streamline(model, posterior, x)(x)
    ratio = (g.variance.mean() / sampled_variance(model, posterior, x, 200).mean()).sqrt()
    assert ratio.item() == pytest.approx(network.seen, rel=0.15)


@pytest.mark.parametrize(("i", "network"), list(enumerate(NETWORKS)), ids=str)
@one_trace
def test_linearised_is_the_jacobian_form(i: int, network: Network) -> None:
    """Everything is random, the scales of norms too; the place of a network decides its posterior structure."""
    assert difference(*built(network), STRUCTURES[i % len(STRUCTURES)]) < 1e-9


@EACH
@one_trace
def test_fitted_kronecker_factors_against_sampling(network: Network) -> None:
    model, x = built(network)
    posterior = fitted(model, x).scale(1e-6)
    g = pg.streamline(model, posterior, x)(x)
    torch.testing.assert_close(g.mean, model(x).detach())
    assert (g.variance > 0).all()
    ratio = (g.variance.mean() / sampled_variance(model, posterior, x, 200).mean()).sqrt()
    assert ratio.item() == pytest.approx(network.fitted, rel=0.15)


@pytest.mark.parametrize("kind", ["independent", "kronecker"])
def test_full_structure_tends_to_sampling(kind: str) -> None:
    """Without residual sums the joint covariance leaves nothing out, so for a small variance the ratio is one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 6, 2, groups=3),
        nn.GroupNorm(2, 6), nn.SiLU(), nn.ConvTranspose2d(6, 2, 2), nn.Upsample(scale_factor=1.5, mode="bilinear"),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3),
    ).double().eval()  # fmt: skip
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    posterior = independent(model) if kind == "independent" else fitted(model, x).scale(1e-6)
    full = pg.streamline(model, posterior, x, covariance="full")(x).variance.mean()
    sampled = sampled_variance(model, posterior, x, 4000).mean()
    assert (full / sampled).sqrt().item() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("network", [NETWORKS[0], NETWORKS[6]], ids=str)
@one_trace
def test_streamlined_network_exports_with_an_open_batch(network: Network) -> None:
    model, x = built(network)
    net = pg.streamline(model, independent(model), x)
    program = torch.export.export(net, (x,), dynamic_shapes=(({0: torch.export.Dim.AUTO},),), strict=False)
    for batch in (2, 3):
        g, expected = program.module()(x[:batch]), net(x[:batch])
        torch.testing.assert_close(g.mean, expected.mean)
        torch.testing.assert_close(g.variance, expected.variance)
