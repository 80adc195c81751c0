"""Written-out derivatives against automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import propagauss as pg
from propagauss.rules.elementwise.activation import CLOSED, Elementwise
from propagauss.rules.elementwise.slopes import TANGENTS, UNARY, partial_slope, with_slope

aten = torch.ops.aten
SETTINGS: dict[Any, tuple[Any, ...]] = {  # of ops that need some, and others than the default
    aten.threshold.default: (0.1, 20.0),
    aten.clamp.default: (-1.1, 0.9),
    aten.clamp_min.default: (-0.4,),
    aten.clamp_max.default: (0.4,),
    aten.pow.Tensor_Scalar: (3,),
    aten.elu.default: (0.7,),
    aten.softplus.default: (2.0,),
    aten.softshrink.default: (0.2,),
    aten.hardtanh.default: (-1.5, 0.9),
    aten.leaky_relu.default: (0.2,),
}
POSITIVE = {getattr(aten, name).default for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt")}
PAIRS = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default]


def derivative(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


def name(op: Any) -> str:
    return str(op)


@pytest.mark.parametrize("op", UNARY, ids=name)
def test_functions_of_one_variable(op: Any) -> None:
    x = torch.cat([torch.linspace(-7, 7, 40, dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)])
    x = x[x > 0] if op in POSITIVE else x
    settings = SETTINGS.get(op, ())
    found = partial_slope(op, op(x, *settings), (x, *settings), 0)
    # PyTorch's own derivatives of hardsigmoid and celu are rounded to single precision
    torch.testing.assert_close(found, derivative(lambda t: op(t, *settings), x), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("op", PAIRS, ids=name)
def test_functions_of_two_variables(op: Any, at: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 30, dtype=torch.float64, generator=generator)
    b[:5] = a[:5]  # where the larger one is not unique
    values = (a, b)
    found = partial_slope(op, op(*values), values, at)
    assert found is not None
    by_one = derivative(lambda t: op(*(t if i == at else v for i, v in enumerate(values))), values[at])
    torch.testing.assert_close(found.expand_as(a), by_one)


def test_settings_given_by_name() -> None:
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    y = aten.add.Tensor(x, x, alpha=3)
    assert TANGENTS[aten.add.Tensor](y, (x, x), (1.0, 1.0), alpha=3) == 4
    gelu = TANGENTS[aten.gelu.default](aten.gelu(x, approximate="tanh"), (x,), (1.0,), approximate="tanh")
    torch.testing.assert_close(gelu, derivative(lambda t: aten.gelu(t, approximate="tanh"), x))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "several uses": lambda x: aten.mul.Tensor(x, aten.sigmoid.default(aten.mul.Tensor(x, 1.7))),
    "sum of itself": lambda x: aten.add.Tensor(x, x, alpha=2),
    "constant slope": lambda x: aten.sub.Tensor(aten.mul.Scalar(x, 3.0), 1.0),
    "quotient": lambda x: aten.div.Tensor(x, aten.add.Scalar(aten.abs.default(x), 1.0)),
    "branches": lambda x: aten.where.self(aten.gt.Scalar(x, 0.3), aten.square.default(x), aten.neg.default(x)),
    "one branch": lambda x: aten.where.self(aten.gt.Scalar(x, 0.3), x, torch.zeros((), dtype=torch.float64)),
    "a number in one branch": lambda x: aten.where.ScalarOther(aten.gt.Scalar(x, 0.3), aten.square.default(x), 2.0),
    "power of a number": lambda x: aten.pow.Scalar(2.0, aten.sin.default(x)),
    "gelu in pieces": lambda x: aten.mul.Tensor(
        aten.mul.Tensor(x, 0.5),
        aten.add.Tensor(aten.tanh.default(aten.add.Tensor(x, aten.pow.Tensor_Scalar(x, 3))), 1.0),
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_chain_rule(function: Callable[..., Tensor]) -> None:
    x = torch.linspace(-2, 2, 10, dtype=torch.float64)
    module = with_slope(fx.symbolic_trace(function))
    assert module is not None
    value, slope = module(x)
    torch.testing.assert_close(value, function(x), rtol=0, atol=0)
    torch.testing.assert_close(slope, derivative(function, x))


def test_plain_values_beside_the_variable() -> None:
    x, other = torch.linspace(-2, 2, 9, dtype=torch.float64), torch.linspace(0.5, 1, 9, dtype=torch.float64)

    def function(x: Tensor, other: Tensor) -> Tensor:
        scaled = aten.mul.Tensor(x, aten.exp.default(other))
        return aten.maximum.default(scaled, other)

    module = with_slope(fx.symbolic_trace(function))
    assert module is not None
    value, slope = module(x, other)
    torch.testing.assert_close(value, function(x, other))
    torch.testing.assert_close(slope, derivative(lambda t: function(t, other), x))


def test_an_unknown_op_is_left_to_automatic_differentiation() -> None:
    assert with_slope(fx.symbolic_trace(lambda x: aten.mul.Tensor(x, aten.lgamma.default(x)))) is None

    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.lgamma(x)

    x = pg.Gaussian(torch.rand(3, 4, dtype=torch.float64) + 1, torch.rand(3, 4, dtype=torch.float64))
    found = pg.streamline(Unknown(), None, x)(x)
    slope = derivative(lambda t: t * torch.lgamma(t), x.mean)
    torch.testing.assert_close(found.variance, slope.square() * x.variance)


def test_common_networks_are_written_out() -> None:
    """No activation of torch.nn is left to automatic differentiation, which exporters do not follow."""
    torch.manual_seed(0)
    kinds = (nn.SELU, nn.Mish, nn.CELU, nn.Softsign, nn.Tanhshrink, nn.Hardswish, nn.LogSigmoid, nn.RReLU, nn.ReLU6)
    kinds += (nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.LeakyReLU, nn.Hardtanh, nn.Softshrink, nn.Hardsigmoid)
    model = nn.Sequential(*(kind() for kind in kinds)).eval()
    x = pg.Gaussian(torch.randn(2, 3), torch.rand(2, 3))
    net = pg.streamline(model, None, x)
    left = [m for m in net.modules() if isinstance(m, Elementwise) and m.with_slope is None]
    assert not left
    assert CLOSED.keys() == UNARY.keys()
