"""Ops that PyTorch cannot differentiate, or says nothing of: `linearise` names them, and `streamline` as well."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from engines.test_bad_input import Call, diagonal
from propagauss.rules.facts import facts

ENGINES = pytest.mark.parametrize("engine", [pg.streamline, pg.linearise], ids=lambda f: f.__name__)
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
special = torch.special
aten = torch.ops.aten


@torch.library.custom_op("propagauss_suitable::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)

WITHOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "special_bessel_j0": lambda h: special.bessel_j0(h).tanh(),
    "special_chebyshev_polynomial_t": lambda h: special.chebyshev_polynomial_t(h.tanh(), 3),
    "special_modified_bessel_k1": lambda h: special.modified_bessel_k1(h.exp()) + h,
    "special_zeta": lambda h: special.zeta(h.exp() + 1, h.exp()),
    "propagauss_suitable.cube": cube,
}


@ENGINES
@pytest.mark.parametrize("name", WITHOUT)
def test_ops_without_derivative_are_refused(name: str, engine: Callable[..., nn.Module]) -> None:
    """PyTorch takes some for constants, whose variance would be zero."""
    model = Call(WITHOUT[name]).double().eval()
    with pytest.raises(pg.UnsupportedOpError, match=rf"{name}.* at '\(model\)'"):
        engine(model, diagonal(model), X)


@ENGINES
@pytest.mark.parametrize("name", WITHOUT)
def test_they_may_come_before_the_posterior_or_decide(name: str, engine: Callable[..., nn.Module]) -> None:
    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(WITHOUT[name](self.first(x)))
            return h * (WITHOUT[name](h.detach()) > 0.5)

    model = Before().double().eval()
    posterior = pg.DiagonalPosterior({n: torch.ones_like(p) for n, p in model.layer.named_parameters(prefix="layer")})
    g = engine(model, posterior, X)(X)
    torch.testing.assert_close(g.mean, model(X).detach())
    if engine is pg.linearise:
        torch.testing.assert_close(g.covariance, pg.baselines.GLM(model, posterior)(X).covariance)


def test_heaviside_is_a_decision() -> None:
    """PyTorch has no derivative of it; that of `where` is right on both sides of the step."""
    model = Call(lambda h: h * torch.heaviside(h, torch.tensor(0.5, dtype=h.dtype))).double().eval()
    g = pg.linearise(model, diagonal(model), X)(X)
    relu = Call(torch.relu).double().eval()
    relu.load_state_dict(model.state_dict())
    torch.testing.assert_close(g.mean, model(X).detach())
    torch.testing.assert_close(g.covariance, pg.linearise(relu, diagonal(relu), X)(X).covariance)


@torch.library.custom_op("propagauss_suitable::square", mutates_args=())
def square(x: Tensor, w: Tensor) -> Tensor:
    return x * x * w


square.register_fake(lambda x, w: torch.empty_like(x))
square.register_autograd(
    lambda c, g: (2 * c.saved_tensors[0] * c.saved_tensors[1] * g, (c.saved_tensors[0] ** 2 * g).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Squared(nn.Module):
    """A custom op with a formula for its gradient, of a value and of a parameter that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.w = nn.Linear(3, 3), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return square(self.layer(x), self.w)


class SquaredInPieces(Squared):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) ** 2 * self.w


def test_custom_ops_with_a_gradient_are_linearised() -> None:
    model, same = Squared().double().eval(), SquaredInPieces().double().eval()
    same.load_state_dict(model.state_dict())
    net = pg.linearise(model, diagonal(model), X)
    for x in (X, X[:1]):
        g = net(x)
        torch.testing.assert_close(g.mean, model(x).detach())
        torch.testing.assert_close(g.covariance, pg.baselines.GLM(same, diagonal(same))(x).covariance)


CERTAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "ones_like": torch.ones_like,
    "new_zeros": lambda h: h.new_zeros(h.shape[0], 2),
    "floor_divide": lambda h: h // 0.5,
}


@pytest.mark.parametrize("name", CERTAIN)
def test_an_output_that_is_the_same_for_all_parameters(name: str) -> None:
    model = Call(CERTAIN[name]).double().eval()
    g = pg.linearise(model, diagonal(model), X)(X)
    torch.testing.assert_close(g.mean, model(X).detach())
    assert not g.covariance.any()


# -- whether the list in known_ops.py is whole

MADE = {
    "detach",
    "data",
    "empty_like",
    "full_like",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_zeros",
}
MADE |= {"ones_like", "zeros_like", "rand_like", "randn_like"}  # none of them reads the entries of its argument
MADE |= {"histc"}  # counts, which are constant between jumps


def test_all_ops_that_pytorch_takes_for_constants_are_known() -> None:
    names = {n.removeprefix("aten::").split(".")[0] for n in torch._C._dispatch_get_all_op_names() if "aten::" in n}
    constant = {op for name in names - MADE if name[0] != "_" for op in overloads(name) if is_constant(op)}
    assert len(constant) > 20
    assert not [op for op in constant if not facts(op).no_gradient]


def overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    names = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    return [getattr(packet, o) for o in names if "out" not in o and not getattr(packet, o)._schema.is_mutable]


VALUES: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: (torch.rand(3, 3, dtype=torch.float64) / 2 + 0.25).requires_grad_(),
    "int": lambda: 1,
    "number": lambda: 0.5,
    "float": lambda: 0.5,
    "bool": lambda: True,
    "List[int]": lambda: [0],
}


def is_constant(op: Any) -> bool:
    """Whether a real result of a tensor that needs a gradient needs none."""
    types = [str(a.type) for a in op._schema.arguments if not a.has_default_value()]
    if "Tensor" not in types or not VALUES.keys() >= set(types):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = torch.utils._pytree.tree_leaves(op(*(VALUES[t]() for t in types)))
    except Exception:  # it takes other values than these
        return False
    real = [r for r in results if isinstance(r, Tensor) and r.is_floating_point()]
    return bool(real) and not any(r.requires_grad for r in real)
