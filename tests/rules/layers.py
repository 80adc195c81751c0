"""Layers with random parameters: what a case is, and the checks that linear layers and convolutions have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

import propagauss as pg
from rules.together import compiled, exported

BATCH = 3


class Own(nn.Module):
    """A function of an input and of parameters that belong to no layer."""

    def __init__(self, function: Callable[[Own, Tensor], Tensor], **shapes: tuple[int, ...]):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@dataclass(frozen=True)
class Layer:
    """One way to use random parameters.

    Args:
        make: the module; all of its parameters are random unless `random` names some.
        event: shape of one input sample.
        exact: exact moments at any variance, else to first order.
        linear: a linear layer, so that the paper's sums apply: "row" or "column" for how the weight is stored.
        lone: the parameters are used outside a linear layer.
        vocabulary: the inputs are indices below this number.
        fixed: tried with a fixed input only, as a random one is linearised by another rule.
        first_order: the full structure linearises the parameter together with an uncertain input.
    """

    name: str
    make: Callable[[], nn.Module]
    event: tuple[int, ...] = (3,)
    random: tuple[str, ...] | None = None
    exact: bool = True
    linear: str | None = None
    lone: bool = False
    vocabulary: int | None = None
    fixed: bool = False
    first_order: bool = False


@cache
def built(layer: Layer) -> nn.Module:
    """One module for every posterior, so that networks with different ones can come from one trace."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return layer.make().double().eval()


@dataclass(frozen=True)
class Setup:
    """A layer, a posterior with its dense covariance, an input, and the streamlined layer."""

    layer: Layer
    module: nn.Module
    random: dict[str, Tensor]
    posterior: pg.Posterior
    joint: Tensor
    x: pg.Gaussian | Tensor
    net: pg.Streamlined
    structure: str

    @property
    def mean(self) -> Tensor:
        return self.x if isinstance(self.x, Tensor) else self.x.mean

    @property
    def covariance(self) -> Tensor:
        """Input covariance `[B, n, n]`, zero for a fixed input."""
        if isinstance(self.x, Tensor):
            n = self.mean[0].numel()
            return torch.zeros(BATCH, n, n, dtype=torch.float64)
        return self.x.covariance

    def call(self, theta: Tensor, x: Tensor) -> Tensor:
        """The layer as a function of its random parameters, flattened and joined, and of a batch."""
        parts = theta.split([p.numel() for p in self.random.values()])
        values = {n: t.reshape(p.shape) for (n, p), t in zip(self.random.items(), parts, strict=True)}
        return torch.func.functional_call(self.module, values, (x,))

    def theta(self) -> Tensor:
        return torch.cat([p.flatten() for p in self.random.values()])


def covariance_of(g: pg.Gaussian, batch: int = BATCH) -> Tensor:
    """`[B, n, n]` if a joint covariance is kept, else `[B, n]`."""
    return g.covariance if g.is_full else g.variance.reshape(batch, -1)


def reduce(covariance: Tensor, structure: str) -> Tensor:
    return covariance if structure == "full" else covariance.diagonal(dim1=1, dim2=2)


def rows(x: pg.Gaussian | Tensor, index: Tensor) -> pg.Gaussian | Tensor:
    if isinstance(x, Tensor):
        return x[index]
    if x.is_full:
        return pg.Gaussian(x.mean[index], covariance=x.covariance[index])
    return pg.Gaussian(x.mean[index], x.variance[index])


# -- the part of the contract that is the same for every layer


def check_batches(s: Setup) -> None:
    """Splitting and permuting the batch changes nothing, and it may be empty."""
    whole, order = s.net(s.x), torch.tensor([2, 0, 1])
    parts = [s.net(rows(s.x, i.unsqueeze(0))) for i in order]
    torch.testing.assert_close(torch.cat([p.mean for p in parts]), whole.mean[order])
    torch.testing.assert_close(torch.cat([covariance_of(p, 1) for p in parts]), covariance_of(whole)[order])
    empty = s.net(rows(s.x, order[:0]))
    assert empty.mean.shape == empty.variance.shape == (0, *whole.mean.shape[1:])


def check_covariance(s: Setup) -> None:
    """The result is a covariance."""
    g = s.net(s.x)
    assert g.variance.shape == g.mean.shape
    assert (g.variance >= 0).all()
    if s.structure == "full":
        n = g.mean[0].numel()
        assert g.covariance.shape == (BATCH, n, n)
        torch.testing.assert_close(g.covariance, g.covariance.mT)
        assert torch.linalg.eigvalsh(g.covariance).min() >= -1e-10 * g.covariance.abs().max()


def check_gradients(s: Setup) -> None:
    make = pg.Gaussian.full if s.structure == "full" else pg.Gaussian.diagonal

    def forward(m: Tensor, *v: Tensor) -> tuple[Tensor, Tensor]:
        g = s.net(make(m, *v) if v else m)
        return g.mean, covariance_of(g)

    leaves = [s.mean] if isinstance(s.x, Tensor) else [s.x.mean, s.x.covariance if s.x.is_full else s.x.variance]
    assert torch.autograd.gradcheck(forward, [t.clone().requires_grad_() for t in leaves], fast_mode=True)


def elsewhere(setups: Sequence[Setup]) -> list[tuple[pg.Gaussian, ...]]:
    """What each network returns exported, and compiled; all of them are exported and compiled as one."""
    nets, inputs = [s.net for s in setups], [(s.x,) for s in setups]
    return list(zip(exported(nets, inputs), compiled(nets, inputs), strict=True))


def check_portable(s: Setup, found: tuple[pg.Gaussian, ...]) -> None:
    """Exported and compiled results equal eager ones."""
    expected = s.net(s.x)
    for g in found:
        torch.testing.assert_close(g.mean, expected.mean)
        torch.testing.assert_close(covariance_of(g), covariance_of(expected))


def check_diagonal(diagonal: Setup, full: Setup) -> None:
    """On a diagonal input the diagonal structure loses nothing but covariances."""
    torch.testing.assert_close(diagonal.net(diagonal.x).variance, full.net(diagonal.x).variance, rtol=1e-9, atol=1e-12)
