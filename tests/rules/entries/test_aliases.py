"""Values that share memory, and ops that only pretend to do something: means are the model's own, always."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import propagauss as pg

F64 = torch.float64


Same = Callable[[Tensor], Tensor]
Change = Callable[[Tensor, Tensor], Tensor]


class Skip(nn.Module):
    """`y = same(h)`, then something in place, then both are read: once for each pair, with its own `h`."""

    def __init__(self, *pairs: tuple[Same, Change]):
        super().__init__()
        self.layer, self.pairs = nn.Linear(3, 3, dtype=F64), pairs

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = [self.layer(x) for _ in self.pairs]
        results = tuple(change(h, same(h)) for (same, change), h in zip(self.pairs, values, strict=True))
        return results if len(results) > 1 else results[0]


# what may return its input itself, or a view of it, and what never does
SAME: dict[str, Same] = {
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "dropout of nothing": lambda h: F.dropout(h, 0.0, training=True),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.5, training=False),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h, 0.5, training=False),
    "channel dropout": lambda h: F.dropout1d(h, 0.5, training=False),
    "contiguous": lambda h: h.contiguous(),
    "to": lambda h: h.to(F64),
    "type": lambda h: h.type(F64),
    "reshape": lambda h: h.reshape(-1, 3),
    "view": lambda h: h.view(-1, 3),
    "expand": lambda h: h.expand(-1, -1),
    "slice": lambda h: h[:],
    "detach": lambda h: h.detach(),
    "data": lambda h: h.data,
    "alias": lambda h: torch.ops.aten.alias(h),
    "flatten": lambda h: h.flatten(1),
    "squeeze": lambda h: h.squeeze(-1),
    "plus": lambda h: +h,
    "at least two dimensions": lambda h: torch.atleast_2d(h),
    "einsum": lambda h: torch.einsum("ij->ij", h),
    "einsum, transposed": lambda h: torch.einsum("ij->ji", h).t(),
    "real": lambda h: h.real,
    "transposes": lambda h: h.t().t(),
    "chunk": lambda h: h.chunk(1)[0],
    "unsafe chunk": lambda h: torch.unsafe_chunk(h, 1)[0],
    "unbind": lambda h: h.unsqueeze(0).unbind(0)[0],
    "stack": lambda h: torch.stack([h])[0],
    "clone": lambda h: h.clone(),
    "identity": nn.Identity(),
}
CHANGES: dict[str, Change] = {
    "the copy": lambda h, y: (y.relu_(), y + h)[1],
    "the original": lambda h, y: (h.relu_(), y + h)[1],
    "both in turn": lambda h, y: (y.mul_(2), h.add_(1), y + 2 * h)[2],
    "the result": lambda h, y: y.relu_() + h,
}


def small(model: nn.Module, variance: float = 1e-8) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in model.named_parameters()})


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("which", [SAME.keys() - {"clone"}, {"clone"}], ids=["aliases", "a copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_mean_is_the_models(change: str, which: set[str], x: Tensor) -> None:
    """Aliases in one model: PyTorch takes longer to get ready for undoing changes in place than to undo them."""
    torch.manual_seed(0)
    names = [name for name in SAME if name in which]
    model = Skip(*((SAME[name], CHANGES[change]) for name in names)).eval()
    with torch.no_grad():
        expected = pytree.tree_leaves(model(x))
    found = pg.streamline(model, small(model), x)(x)
    for name, g, mean in zip(names, found if isinstance(found, tuple) else [found], expected, strict=True):
        torch.testing.assert_close(g.mean, mean, msg=lambda text, name=name: f"{name}: {text}")


def test_layers_of_a_usual_network(x: Tensor) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rest = nn.Linear(3, 3, dtype=F64), nn.Sequential(nn.Dropout(0.5), nn.ReLU(inplace=True))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return self.rest(h) + h

    model = Block().eval()
    g = pg.streamline(model, small(model), x)(x)
    torch.testing.assert_close(g.mean, model(x).detach())


PARTS: dict[str, Change] = {
    "zero": lambda h, y: (y[:, 0].zero_(), y + h)[1],
    "a number": lambda h, y: (y.__setitem__((slice(None), 1), 5.0), y + h)[1],
    "filled": lambda h, y: (y[:, 1:].fill_(2), y + h)[1],
    "all": lambda h, y: (y.zero_(), y + h)[1],
}


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_that_are_overwritten(part: str, covariance: Any, x: Tensor) -> None:
    model = Skip((torch.clone, PARTS[part])).eval()
    net = pg.streamline(model, small(model), x, covariance=covariance)
    for batch in (x, x[:1]):
        torch.testing.assert_close(net(batch).mean, model(batch).detach())
    assert (net(x).variance > 0).all()


def test_a_sum_in_place_keeps_the_precision_of_its_left_side() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("offset", torch.ones(3, dtype=F64))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            h += self.offset
            return h

    model, x = Mixed().eval(), torch.randn(4, 3)
    g = pg.streamline(model, small(model), x)(x)
    assert g.mean.dtype == torch.float32
    torch.testing.assert_close(g.mean, model(x).detach())


def test_the_callers_tensors_are_not_touched() -> None:
    """Neither by a model that changes its input, nor by torch's marks for sizes that were to stay open."""

    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if type(x.shape[0]) is not int:
                raise RuntimeError("the batch must not be open")
            x.mul_(2)
            return self.layer(x)

    model, x = Careless().eval(), torch.randn(4, 3)
    before, known = x.clone(), set(dir(x))
    net = pg.streamline(model, small(model), x)
    assert torch.equal(x, before) and not [name for name in set(dir(x)) - known if "dynam" in name]
    g = net(x.clone())
    torch.testing.assert_close(g.mean, model(before.clone()).detach())


# -- detach


def sampled(model: nn.Module, x: Tensor, variance: float, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    draws = []
    for _ in range(samples):
        named = {
            n: p.detach() + variance**0.5 * torch.randn(p.shape, dtype=F64, generator=generator)
            for n, p in model.named_parameters()
        }
        draws.append(torch.func.functional_call(model, named, (x,)).detach())
    return torch.stack(draws).std(0)


DETACHED: dict[str, Change] = {
    "product": lambda h, y: h * y,
    "sum": lambda h, y: h + y,
    "exponential": lambda h, y: h.exp() * y,
}


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("name", DETACHED)
def test_detach_does_not_stop_uncertainty(name: str, covariance: Any, x: Tensor) -> None:
    torch.manual_seed(0)
    model = Skip((torch.detach, DETACHED[name])).eval()
    g = pg.streamline(model, small(model, 1e-6), x, covariance=covariance)(x)
    torch.testing.assert_close(g.variance.sqrt(), sampled(model, x, 1e-6, 2000), rtol=0.12, atol=0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_straight_through_is_a_constant(covariance: Any, x: Tensor) -> None:
    """`h + (sign(h) - h).detach()` is `sign(h)`, whatever its gradient is made to look like."""
    model = Skip((nn.Identity(), lambda h, _: h + (h.sign() - h).detach())).eval()
    g = pg.streamline(model, small(model), x, covariance=covariance)(x)
    torch.testing.assert_close(g.mean, model(x).detach())
    assert g.variance.max() < 1e-20
