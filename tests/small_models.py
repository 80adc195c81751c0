"""Small models from any function of a few layers, and the standard deviations that their derivatives give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg

F64 = torch.float64
TINY = 1e-8


class Call(nn.Module):
    """Layers and buffers by name, and any function of them and the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def model_of(function: Callable[..., Any], **parts: Any) -> nn.Module:
    return Call(function, **parts).to(F64).eval()


def layer(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def small(model: nn.Module, variance: float = TINY) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in model.named_parameters()})


def first_order(model: nn.Module, x: Tensor) -> Tensor:
    """Standard deviations by `Σ_p J_p² v_p`."""
    named = {n: p.detach() for n, p in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(named)
    shape = model(x).shape
    return sum((TINY * j.reshape(*shape, -1).square().sum(-1) for j in jacobians.values()), torch.zeros(())).sqrt()


def assert_mean(model: nn.Module, *x: Tensor, **options: Any) -> Any:
    g = pg.streamline(model, small(model), x, **options)(*x)
    torch.testing.assert_close(g.mean, model(*x).detach(), rtol=1e-9, atol=1e-9)
    return g


X = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
SEQUENCE = torch.randn(3, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
BOTH = pytest.mark.parametrize("covariance", ["diagonal", "full"])
