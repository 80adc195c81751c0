"""Samples that are not outermost in a dimension which they share with other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg

B, T, D = 3, 5, 4


class Model(nn.Module):
    """A function of inputs and of modules or parameters by name."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def windows(s: Any, x: Tensor) -> Tensor:
    """Windows of 2 x 2 pixels, all samples of a window beside one another."""
    h = x.view(-1, 2, 2, 2, 2, D).permute(1, 3, 0, 2, 4, 5).reshape(-1, 4, D)
    h = s.a(h).tanh().view(2, 2, -1, 2, 2, D).permute(2, 0, 3, 1, 4, 5).reshape(-1, 16, D)
    return h.mean(1)


def heads_first(s: Any, x: Tensor) -> Tensor:
    h = s.a(x.view(-1, T, 2, 2).permute(2, 0, 1, 3).reshape(-1, T, 2)).tanh()
    return h.view(2, -1, T, 2).permute(1, 2, 0, 3).reshape(-1, T, D).sum(1)


def attention_by_heads(s: Any, x: Tensor, i: Tensor) -> Tensor:
    batch = x.shape[0]
    q = s.a(x).view(batch, T, 2, 2).transpose(1, 2).reshape(batch * 2, T, 2)
    h = (torch.softmax(q @ q.mT, -1) @ q).view(batch, 2, T, 2).transpose(1, 2).reshape(batch, T, D)
    return s.o(h)[torch.arange(batch), i]


def pair(s: Any, x: Tensor, y: Tensor) -> Tensor:
    u, v = s.a(torch.cat([x, y])).tanh().chunk(2)
    return s.b((u - v).abs())


def guided(s: Any, x: Tensor) -> Tensor:
    u, v = s.a(torch.cat([x * 0, x])).tanh().chunk(2)
    return u + 2 * (v - u)


def by_time(s: Any, x: Tensor) -> Tensor:
    return s.a(x.transpose(0, 1).reshape(-1, D)).tanh().view(T, -1, 3).transpose(0, 1)[:, 2]


def added_rows(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).tanh()
    return torch.addmm(h.view(-1, D), h.view(-1, D), s.w).view(-1, T, D)[:, 2]


def written_to_a_view(s: Any, x: Tensor) -> Tensor:
    """Beside what is written, a part of size zero is left."""
    h = s.a(x).tanh()
    g = torch.zeros_like(h)
    g[:, 0] = 2 * h[:, 1]
    g[:, 1:].add_(h[:, :2])
    return g


def time_major(s: Any, h: Tensor, x: Tensor) -> Tensor:
    return s.b(h.transpose(0, 1).flatten(0, 1).tanh()).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def gated(s: Any, x: Tensor) -> Tensor:
    """Behind a gate that is zero, as in a residual branch that has not learnt yet, no row shows whose it is."""
    return time_major(s, s.gate * s.a(x), x) + x[..., :2]


def compared(s: Any, x: Tensor, y: Tensor) -> Tensor:
    u, v = s.b((s.gate * s.a(torch.cat([x, y]))).tanh()).chunk(2)
    return u - v + x[:, :2]


def by_task(s: Any, x: Tensor, task: Tensor) -> Tensor:
    return time_major(s, s.a(x + s.tasks(task)[:, None]), x)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


one, many = drawn(B, D), drawn(B, T, D)
CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "pairs beside one another": lambda: (Model(pair, a=nn.Linear(D, 6), b=nn.Linear(6, 2)), (one, drawn(B, D))),
    "guided": lambda: (Model(guided, a=nn.Linear(D, 3)), (one,)),
    "augmented": lambda: (
        Model(lambda s, x: s.a(torch.cat([x, x.flip(1)])).tanh().view(2, -1, 3).mean(0), a=nn.Linear(D, 3)),
        (one,),
    ),
    "repeated": lambda: (
        Model(lambda s, x: s.a(x.repeat(3, 1)).tanh().view(3, -1, 3).sum(0), a=nn.Linear(D, 3)),
        (one,),
    ),
    "written to a view": lambda: (Model(written_to_a_view, a=nn.Linear(D, 3)), (one,)),
    "a gate of zero": lambda: (
        Model(gated, a=nn.Linear(D, 4), b=nn.Linear(4, 2), gate=torch.zeros(())),
        (many,),
    ),
    "pairs behind a gate of zero": lambda: (
        Model(compared, a=nn.Linear(D, 4), b=nn.Linear(4, 2), gate=torch.zeros(())),
        (one, drawn(B, D)),
    ),
    "one task, and zeros": lambda: (
        Model(by_task, a=nn.Linear(D, 4), b=nn.Linear(4, 2), tasks=nn.Embedding(1, D)),
        (torch.zeros(B, T, D, dtype=torch.float64), torch.zeros(B, dtype=torch.long)),
    ),
    "time first": lambda: (Model(by_time, a=nn.Linear(D, 3)), (many,)),
    "time first, a factor": lambda: (
        Model(lambda s, x: (x.transpose(0, 1).reshape(-1, D) * s.w).tanh().view(T, -1, D).sum(0), w=drawn(D)),
        (many,),
    ),
    "recurrent, time first": lambda: (
        Model(
            lambda s, x: s.b(s.l(x.transpose(0, 1))[0].reshape(-1, 3)).view(T, -1, 2)[-1],
            l=nn.LSTM(D, 3),
            b=nn.Linear(3, 2),
        ),
        (many,),
    ),
    "normalised pairs": lambda: (
        Model(lambda s, x, y: torch.mul(*s.n(torch.cat([x, y])).tanh().chunk(2)), n=nn.LayerNorm(D)),
        (one, drawn(B, D)),
    ),
    "frames": lambda: (
        Model(
            lambda s, x: s.c(x.transpose(0, 1).flatten(0, 1)).tanh().view(2, -1, 3, 4, 4).mean((0, 3, 4)),
            c=nn.Conv2d(1, 3, 3, padding=1),
        ),
        (drawn(B, 2, 1, 4, 4),),
    ),
    "heads first": lambda: (Model(heads_first, a=nn.Linear(2, 2)), (many,)),
    "windows": lambda: (Model(windows, a=nn.Linear(D, D)), (drawn(B, 4, 4, D),)),
    # selections that early selection must leave, or read with care
    "one token of merged heads": lambda: (
        Model(attention_by_heads, a=nn.Linear(D, D), o=nn.Linear(D, 3)),
        (many, torch.tensor([0, 3, 4])),
    ),
    "counted from the end": lambda: (
        Model(lambda s, x, i: s.o(s.a(x).tanh())[torch.arange(x.shape[0]), i], a=nn.Linear(D, D), o=nn.Linear(D, 3)),
        (many, torch.tensor([-1, 2, -5])),
    ),
    "queries without samples": lambda: (
        Model(
            lambda s, x: F.scaled_dot_product_attention(s.q, s.k(x), s.v(x))[:, 0],
            q=drawn(2, D),
            k=nn.Linear(D, D),
            v=nn.Linear(D, D),
        ),
        (many,),
    ),
    "a mask of one row": lambda: (
        Model(lambda s, x: F.scaled_dot_product_attention(s.k(x), s.k(x), x, s.m)[:, 2], m=drawn(T), k=nn.Linear(D, D)),
        (many,),
    ),
    "added rows": lambda: (Model(added_rows, a=nn.Linear(D, D), w=drawn(D, D)), (many,)),
    "a vector as weight": lambda: (Model(lambda s, x: F.linear(x, s.w).unsqueeze(-1), w=drawn(D)), (one,)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_jacobian_form(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    model = model.double().eval()
    posterior = pg.DiagonalPosterior({n: 0.1 + 0.1 * torch.rand_like(p) for n, p in model.named_parameters()})
    truth = pg.baselines.GLM(model, posterior)(inputs).covariance
    net = pg.linearise(model, posterior, inputs)
    torch.testing.assert_close(net(*inputs).covariance, truth, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(net(*(x[:2] for x in inputs)).covariance, truth[:2], rtol=1e-9, atol=1e-12)


def some_rows_are_halves(s: Any, x: Tensor) -> Tensor:
    h = s.a(x).tanh()
    return torch.cat([h[:1] / 2, h[1:]])


def the_first_from_the_second(s: Any, x: Tensor) -> Tensor:
    g = (h := s.a(x)).clone()
    g[0] = h[1] * 2
    return g


@pytest.mark.parametrize("function", [some_rows_are_halves, the_first_from_the_second])
def test_samples_by_number_are_refused(function: Callable[..., Tensor]) -> None:
    model = Model(function, a=nn.Linear(D, 3)).double().eval()
    posterior = pg.DiagonalPosterior({n: torch.ones_like(p) for n, p in model.named_parameters()})
    with pytest.raises(pg.UnsupportedOpError, match=r"takes the batch apart|depends on the others"):
        pg.linearise(model, posterior, one)


def test_rows_that_never_change_are_refused() -> None:
    model = Model(lambda s, x: time_major(s, torch.relu(s.a(x) - 50), x), a=nn.Linear(D, 4), b=nn.Linear(4, 2))
    posterior = pg.DiagonalPosterior({n: torch.ones_like(p) for n, p in model.double().eval().named_parameters()})
    with pytest.raises(pg.UnsupportedOpError, match=r"aten\.flatten.* where it cannot be followed"):
        pg.linearise(model, posterior, many)


def test_an_example_of_many_samples() -> None:
    """Few of them are looked at, unless the model needs as many as there are."""
    x, layer = drawn(300, D), nn.Linear(D, 3)
    plain, nine = Model(lambda s, x: s.a(x).tanh(), a=layer), Model(lambda s, x: s.a(x + x[8] * 0).tanh(), a=layer)
    posterior = pg.DiagonalPosterior({f"a.{n}": 0.1 * torch.ones_like(p.double()) for n, p in layer.named_parameters()})
    truth = pg.baselines.GLM(plain.double().eval(), posterior)(x[:9]).covariance
    for model in (plain, nine.eval()):
        torch.testing.assert_close(pg.linearise(model, posterior, x)(x[:9]).covariance, truth)


def test_an_example_of_one_sample() -> None:
    """Both samples of the traced batch are then the same."""
    torch.manual_seed(0)
    model = Model(by_time, a=nn.Linear(D, 3)).double().eval()
    posterior = pg.DiagonalPosterior({n: 0.1 * torch.ones_like(p) for n, p in model.named_parameters()})
    found = pg.linearise(model, posterior, many[:1])(many).covariance
    torch.testing.assert_close(found, pg.baselines.GLM(model, posterior)(many).covariance)
