"""Functions of one uncertain value, written in several ops: one function, not a product of strangers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from propagauss.passes.fusion import is_elementwise, is_pointwise
from rules.cases import Call

F64 = torch.float64
aten = torch.ops.aten
X = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
V = torch.full_like(X, 1e-8)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": lambda x: x * x.sigmoid(),
    "three readers": lambda x: x.exp() - x.sin() * x,
    "meeting again later": lambda x: (y := x.tanh()) * (y.square() + y.exp()),
    "through a reshape": lambda x: x * x.reshape(-1, 2, 2).sigmoid().reshape(-1, 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_slope_is_that_of_the_whole(name: str) -> None:
    g = pg.streamline(Call(FUNCTIONS[name]).eval(), None, pg.Gaussian(X, V))(pg.Gaussian(X, V))
    slope = torch.func.vmap(torch.func.grad(lambda x: FUNCTIONS[name](x).sum()))(X[:, None])[:, 0]
    torch.testing.assert_close(g.variance, slope.square() * V, rtol=1e-6, atol=0)


def test_a_value_that_mixes_entries_is_no_link_in_the_diagonal_structure() -> None:
    """There `x - mean(x)` is a difference of independent values; the joint covariance knows better."""
    model = Call(lambda x: x - x.mean(1, keepdim=True)).eval()
    diagonal, full = (pg.streamline(model, None, pg.Gaussian(X, V), covariance=c) for c in ("diagonal", "full"))
    torch.testing.assert_close(full(pg.Gaussian(X, V)).variance, V * 3 / 4)
    torch.testing.assert_close(diagonal(pg.Gaussian(X, V)).variance, V * 5 / 4)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def test_randomness_of_its_own_ends_a_chain() -> None:
    """`h + W h` with a random `W` is no function of `h` alone: `W` adds what it adds on its own."""
    model, x = Residual().eval(), pg.Gaussian(X, V)
    random = pg.DiagonalPosterior({"layer.weight": torch.full_like(model.layer.weight, 1e-8)})
    fixed, free = (pg.streamline(model, posterior, x, covariance="full")(x) for posterior in (None, random))
    own = 1e-8 * (X.square() + V).sum(1, keepdim=True)
    torch.testing.assert_close(free.variance, fixed.variance + own, rtol=1e-6, atol=0)


def test_which_ops_keep_entries_apart() -> None:
    assert is_pointwise(aten.sigmoid.default) and is_pointwise(aten.hardswish.default)
    assert is_elementwise(aten.view.default) and not is_pointwise(aten.view.default)
    assert not is_elementwise(aten.mean.dim) and not is_elementwise(aten.mm.default)
