"""Products of parameters that no sample is part of, from either side and of any number of dimensions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg

SHAPES = {"vector": (4,), "matrix": (4, 4), "matrices": (3, 4, 4)}
X = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)


class Scaled(nn.Module):
    """A function of a parameter, multiplied by the input."""

    def __init__(self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(self.w).reshape(1, -1)


def check(model: nn.Module, shape: tuple[int, ...]) -> None:
    posterior = pg.DiagonalPosterior({"w": 0.1 + torch.rand(shape, dtype=torch.float64)})
    found = pg.linearise(model.eval(), posterior, X)(X)
    torch.testing.assert_close(found.covariance, pg.baselines.GLM(model, posterior)(X).covariance)


@pytest.mark.parametrize("other", SHAPES)
@pytest.mark.parametrize("own", SHAPES)
def test_products_of_parameters(own: str, other: str) -> None:
    fixed = torch.randn(SHAPES[other], dtype=torch.float64)
    check(Scaled(lambda w: w @ fixed, SHAPES[own]), SHAPES[own])
    check(Scaled(lambda w: fixed @ w, SHAPES[own]), SHAPES[own])


def test_a_number_that_is_repeated() -> None:
    check(Scaled(lambda w: w.repeat(()), ()), ())
    check(Scaled(lambda w: w.repeat(3), ()), ())
