"""`linearise` against the Jacobian form on models of other kinds, of the survey's families and some that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from exactness import STRUCTURES, difference, relative
from families import hand
from families.family import Wanted
from propagauss.baselines import GLM
from propagauss.posteriors import SpectralPosterior
from small_models import Call

FAMILIES = {f.name: f for f in hand.families()}
QUICK = (
    "graph/SGC, APPNP",
    "recurrent/sequence to sequence with attention",
    "science/Fourier neural operator, 1-d",
    "science/neural ODE, Euler",
    "sets/deep sets, sorted (FSPool)",
    "tabular/MLP-Mixer",
    "vision/dense block",
    "vision/squeeze and excitation",
)


@pytest.mark.parametrize(("i", "name"), list(enumerate(QUICK)), ids=str)
def test_families(i: int, name: str) -> None:
    torch.manual_seed(0)
    model, example = FAMILIES[name].build()
    assert difference(Wanted(model).eval(), example, STRUCTURES[i % len(STRUCTURES)]) < 1e-9


EDGES = torch.tensor([[0, 1, 2, 3, 3, 0], [1, 2, 3, 0, 1, 2]])  # from, to


def graph(m: Any, x: Tensor) -> Tensor:
    """`[B, nodes, features]`: every node gets the sum of its neighbours' messages, twice, by the same layer."""
    for _ in range(2):
        x = x.index_add(1, m.edges[1], m.message(x).tanh()[:, m.edges[0]])
    return m.head(x.mean(1))


def one_layer_for_all(m: Any, x: Tensor) -> Tensor:
    """As in ALBERT: one block of attention, used three times."""
    for _ in range(3):
        x = m.block(x)
    return m.head(x[:, 0])


OTHERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "graph": lambda: (
        Call(graph, edges=EDGES, message=nn.Linear(3, 3), head=nn.Linear(3, 2)),
        torch.randn(3, 4, 3),
    ),
    "shared block": lambda: (
        Call(
            one_layer_for_all,
            block=nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True),
            head=nn.Linear(8, 2),
        ),
        torch.randn(3, 4, 8),
    ),
}


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, structure: str) -> None:
    torch.manual_seed(0)
    model, x = OTHERS[name]()
    assert difference(model.eval(), x, structure) < 1e-9


# -- steps in another precision

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h.softmax(-1, dtype=torch.float64).float(),
    "log softmax": lambda h: h.log_softmax(-1, dtype=torch.float64).float(),
    "sum": lambda h: h + h.sum(-1, keepdim=True, dtype=torch.float64).float(),
    "promoted": lambda h: (h * torch.ones(4, dtype=torch.float64) + h).float(),
    "joined": lambda h: torch.cat([h[:, :2].double(), h[:, 2:]], -1).float(),
    "at the end": lambda h: h.double(),
}


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_in_another_precision(name: str, covariance: Any) -> None:
    """Whatever they are, the covariance has the type of the output."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 4)}
    if name == "at the end":
        model: nn.Module = Call(lambda m, x: STEPS[name](m.last(m.first(x).tanh())), **layers).eval()
    else:
        model = Call(lambda m, x: m.last(STEPS[name](m.first(x))), **layers).eval()
    posterior = pg.DiagonalPosterior({n: torch.rand_like(p) for n, p in model.named_parameters()})
    x = torch.randn(3, 3)
    with torch.no_grad():
        found, truth = pg.linearise(model, posterior, x, covariance=covariance)(x), GLM(model, posterior)(x)
    assert found.variance.dtype == found.mean.dtype == truth.mean.dtype
    assert relative(found, truth) < 1e-5


def test_a_spectral_posterior_in_every_direction() -> None:
    """As many eigenvectors as parameters, which is what data in plenty leave."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval(), torch.randn(3, 3).double()
    names = [n for n, _ in model.named_parameters()]
    size = sum(p.numel() for p in model.parameters())
    vectors = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    posterior = SpectralPosterior(names, vectors, 0.1 + torch.rand(size, dtype=torch.float64), 0.8).bind(
        dict(model.named_parameters())
    )
    for some in (posterior, posterior.select("0.*")):
        assert relative(pg.linearise(model, some, x)(x), GLM(model, some)(x)) < 1e-9


def test_a_refused_vmap_leaves_pytorch_as_it_was() -> None:
    """Its levels were begun when the ops of the model were tried one by one."""

    class Mapped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda row: row.tanh())(super().forward(x))

    model = Mapped(3, 3).eval()
    with pytest.raises(pg.UnsupportedOpError, match=r"torch\.vmap"):
        pg.linearise(model, pg.DiagonalPosterior({"weight": torch.ones(3, 3)}), torch.randn(4, 3))
    assert torch.randn(3).isfinite().all()  # it raised "called random operation while in randomness error mode"
