"""What neither engine follows is refused by name, and before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from engines.test_bad_input import Call, diagonal

ENGINES = pytest.mark.parametrize("engine", [pg.streamline, pg.linearise], ids=lambda f: f.__name__)
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def by_memory(h: Tensor) -> Tensor:
    h = h.clone()
    h.as_strided((4, 1), (3, 1)).zero_()
    return h


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a derivative": (lambda h: torch.func.grad(lambda t: t.pow(3).sum())(h), "takes a derivative itself"),
    "a derivative forwards": (
        lambda h: torch.func.jvp(torch.tanh, (h,), (h,))[1],
        "a step of a derivative",
    ),
    "vmap": (lambda h: torch.vmap(torch.tanh)(h), "torch.vmap at '.*' is not followed"),
    "branches": (lambda h: torch.cond(h.sum() > 0, torch.tanh, torch.sin, (h,)), "cond at '.*' has branches"),
    "memory": (by_memory, "aten.as_strided_scatter at '.*' reads or writes memory"),
    "noise of the shape": (lambda h: h * torch.rand(h.shape[0], 3), "draws random numbers"),
    "a sample": (lambda h: F.gumbel_softmax(h), "draws random numbers"),
}


@ENGINES
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_said_what_cannot_be_followed(name: str, engine: Callable[..., nn.Module]) -> None:
    function, message = REFUSED[name]
    model = Call(function)
    with pytest.raises(pg.UnsupportedOpError, match=message):
        engine(model, diagonal(model), X)


@ENGINES
def test_the_same_on_what_is_certain(engine: Callable[..., nn.Module]) -> None:
    """What is computed before anything is random need not be followed; random numbers are refused there, too."""

    class Before(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.as_strided(x, x.shape, (3, 1)) * 2)

    model = Before(3, 2).eval()
    torch.testing.assert_close(engine(model, diagonal(model), X)(X).mean, model(X).detach())

    @torch.library.custom_op("propagauss_refusals::sine_into", mutates_args=("out",))
    def sine_into(out: Tensor, x: Tensor) -> None:
        out.copy_(x.sin())

    class Mutating(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            sine_into(out, x)
            return super().forward(out)

    mutating = Mutating(3, 2).eval()
    torch.testing.assert_close(engine(mutating, diagonal(mutating), X)(X).mean, mutating(X).detach())

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn_like(x))

    with pytest.raises(pg.UnsupportedOpError, match="draws random numbers"):
        engine(noisy := Noisy(3, 2).eval(), diagonal(noisy), X)
