"""ResNet-18 for images of 32 px, every layer Bayesian: the network of most CIFAR experiments, random weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

import propagauss as pg
from benchmarks.case import Case, Method
from benchmarks.low_rank import TOLERANCE, described, sd_error

BATCH = 32
PATIENCE = 3.0  # times the usual time
VARIANCE = 1e-4  # of every random parameter; no timing depends on it
LIMIT = 3.2
EXACT_LIMIT = 24.0  # one forward, and ten sensitivities through each layer and into each weight: 21 times the products
LAYERS = ("*conv*.weight", "*skip.0.weight", "head.*")  # without the scales and shifts of batch normalisation


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, each with batch normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(y + self.skip(x))


class ResNet(nn.Module):
    """ResNet-18 with the stem of CIFAR networks: a 3 x 3 convolution and no pooling before the blocks."""

    def __init__(self, width: int = 64, classes: int = 10):
        super().__init__()
        self.conv, self.norm, self.relu = _conv(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        stages = [
            nn.Sequential(Block(inputs, outputs, 1 if i == 0 else 2), Block(outputs, outputs, 1))
            for i, (inputs, outputs) in enumerate(pairwise(widths))
        ]
        self.stages = nn.Sequential(*stages)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.relu(self.norm(self.conv(x))))).flatten(1))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def build(width: int = 64) -> nn.Module:
    """In evaluation mode, with statistics as training leaves them: none of them 0 or 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ResNet(width)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.0)
                nn.init.normal_(module.bias, std=0.1)
                nn.init.normal_(module.running_mean, std=0.1)  # type: ignore[arg-type]
                nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return model.eval()


@cache
def model() -> nn.Module:
    return build()


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def linearised() -> pg.Streamlined:
    """The exact engine: variances of all ten outputs."""
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, VARIANCE) for n, p in model().named_parameters()})
    return pg.linearise(model(), posterior, inputs(2), covariance="diagonal")


def streamlined(patterns: tuple[str, ...], variance_tolerance: float = 0.0) -> pg.Streamlined:
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, VARIANCE) for n, p in model().named_parameters()})
    return pg.streamline(model(), posterior.select(*patterns), inputs(8), variance_tolerance=variance_tolerance)


@cache
def exact() -> pg.Streamlined:
    return streamlined(("*",))


def products(size: int = 32) -> float:
    """Multiplications of the diagonal formulas over those of the plain forward: 2 for the first layer, then 3."""
    counts: list[int] = []
    hooks = [
        m.register_forward_hook(lambda m, _, y: counts.append(m.weight[0].numel() * y[0].numel()))
        for m in model().modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    ]
    model()(torch.zeros(1, 3, size, size))
    for hook in hooks:
        hook.remove()
    return 3 - counts[0] / sum(counts)


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    return [_case(batch) for batch in batches or (BATCH,)]


def _case(batch: int) -> Case:
    methods = [
        Method("count of multiplications", computed=products),
        Method("every parameter", exact, limit=LIMIT if batch == BATCH else None),
        Method("every layer, not the batch normalisation", partial(streamlined, LAYERS)),
        Method(
            f"every parameter, variance_tolerance={TOLERANCE}",
            partial(described, partial(streamlined, ("*",), TOLERANCE)),
            error=partial(sd_error, exact, lambda: inputs(16)[8:]),
            error_limit=TOLERANCE,
        ),
        Method("every parameter: linearised", linearised, limit=EXACT_LIMIT if batch == BATCH else None),
    ]
    title = f"ResNet-18 for 32 px, batch {batch}; Bayesian:"
    return Case(f"resnet/{batch}", title, partial(inputs, batch), model, methods, PATIENCE)
