"""Recurrent layers and cells, written out step by step."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from propagauss.tracing.trace import trace

pytestmark = pytest.mark.usefixtures("one_trace")  # of the same model, for both structures

F64 = torch.float64
TINY = 1e-8
STEPS = 2  # each is written out: more take longer to trace and are no different
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "RNN": (nn.RNN, {}),
    "RNN with relu": (nn.RNN, {"nonlinearity": "relu"}),
    "LSTM that projects": (nn.LSTM, {"proj_size": 2}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2, "dropout": 0.5},
    "both directions": {"bidirectional": True},
    "two layers, both directions, no biases": {"num_layers": 2, "bidirectional": True, "bias": False},
}


class Recurrent(nn.Module):
    """A recurrent layer, and which of its results is returned."""

    def __init__(self, layer: nn.RNNBase, read: str):
        super().__init__()
        self.layer, self.read = layer, read

    def forward(self, x: Tensor, *first: Tensor) -> Tensor | tuple[Tensor, ...]:
        state = first if len(first) > 1 else first[0] if first else None
        outputs, last = self.layer(x) if state is None else self.layer(x, state)
        h = last[0] if isinstance(last, tuple) else last
        cell = last[-1] if isinstance(last, tuple) else last
        return {"outputs": outputs, "last": h[-1], "states": (h[-1], cell[0], h.transpose(0, 1))}[self.read]


def small(model: nn.Module) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, TINY) for n, p in model.named_parameters()})


@cache
def build(kind: str, read: str = "outputs", **settings: Any) -> Recurrent:
    """The same module every time, which no test changes."""
    torch.manual_seed(0)
    made, own = KINDS[kind]
    return Recurrent(made(4, 3, **own, **{"batch_first": True} | settings), read).to(F64).eval()


def sequence(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(1))


CASES = [
    (kind, shape, covariance)
    for kind in KINDS
    for shape in SHAPES
    for covariance in (("diagonal", "full") if shape == "both directions" else ("diagonal",))
]


@pytest.mark.parametrize("kind, shape, covariance", CASES)
def test_the_mean_is_the_models_for_any_batch(kind: str, shape: str, covariance: Any) -> None:
    model, x = build(kind, **SHAPES[shape]), sequence(3, STEPS, 4)
    net = pg.streamline(model, small(model), x, covariance=covariance)
    for batch in (sequence(3, STEPS, 4), sequence(1, STEPS, 4), sequence(7, STEPS, 4)):
        g = net(batch)
        torch.testing.assert_close(g.mean, model(batch).detach(), rtol=1e-10, atol=1e-10)
        assert (g.variance >= 0).all() and g.variance.max() > 0


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_states(kind: str, covariance: Any) -> None:
    """States come as `[layers, B, H]`; what is picked from them (last layer, cell, moved) has samples first."""
    model, x = build(kind, "states", num_layers=2), sequence(3, STEPS, 4)
    found = pg.streamline(model, small(model), x, covariance=covariance)(x)
    assert len(found) == 3
    for g, mean in zip(found, model(x), strict=True):
        torch.testing.assert_close(g.mean, mean.detach())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_given_first_states(kind: str) -> None:
    model, x = build(kind), sequence(3, STEPS, 4)
    first = (sequence(1, 3, 3), sequence(1, 3, 3) / 2)[: 2 if kind == "LSTM" else 1]
    g = pg.streamline(model, small(model), (x, *first))(x, *first)
    torch.testing.assert_close(g.mean, model(x, *first).detach())


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_time_before_batch(kind: str) -> None:
    """The length is fixed, and the second dimension stays open."""
    model, x = build(kind, "last", batch_first=False), sequence(STEPS, 3, 4)
    net = pg.streamline(model, small(model), x)
    for batch in (x, sequence(STEPS, 6, 4)):
        torch.testing.assert_close(net(batch).mean, model(batch).detach())
    with pytest.raises(pg.InputError, match=rf"takes \[{STEPS}, any, 4\]"):
        net(sequence(STEPS + 1, 3, 4))


def test_another_length_is_a_clear_error() -> None:
    model = build("GRU")
    net = pg.streamline(model, small(model), sequence(3, STEPS, 4))
    with pytest.raises(pg.InputError, match=rf"takes \[any, {STEPS}, 4\]"):
        net(sequence(3, STEPS + 1, 4))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_an_uncertain_input_is_carried_exactly(kind: str) -> None:
    """With fixed weights the layer is one function of its input: `J C Jᵀ`."""
    model, x = build(kind, num_layers=2, bidirectional=True), sequence(2, STEPS, 4)
    g = pg.streamline(model, None, pg.Gaussian(x, torch.full_like(x, TINY)), covariance="full")(
        pg.Gaussian(x, torch.full_like(x, TINY))
    )
    for b in range(2):
        jacobian = torch.func.jacrev(lambda one: model(one[None])[0])(x[b]).reshape(6 * STEPS, 4 * STEPS)
        torch.testing.assert_close(g.covariance[b], (TINY * jacobian @ jacobian.mT).detach(), rtol=1e-6, atol=1e-16)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_one_step_is_exact_to_first_order(kind: str) -> None:
    model, x = build(kind, "last"), sequence(3, 1, 4)
    g = pg.streamline(model, small(model), x, covariance="full")(x)
    named = {n: p.detach() for n, p in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(named)
    expected = sum(TINY * j.flatten(2).square().sum(-1) for j in jacobians.values())
    torch.testing.assert_close(g.variance, expected, rtol=1e-5, atol=0)


CELLS: dict[str, Any] = {
    "LSTM": nn.LSTMCell,
    "GRU": nn.GRUCell,
    "RNN": nn.RNNCell,
    "RNN with relu": lambda i, h: nn.RNNCell(i, h, False, "relu"),
}


class Loop(nn.Module):
    """Two steps of a cell; the sequence lies in one vector, `[B, 2 * 4]`."""

    def __init__(self, cell: Any):
        super().__init__()
        self.cell = cell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, :4])
        state = self.cell(x[:, 4:], state)
        return state[0] if isinstance(state, tuple) else state


@cache
def loop(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Loop(CELLS[kind]).to(F64).eval()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str, covariance: Any) -> None:
    model, x = loop(kind), sequence(3, 8)
    g = pg.streamline(model, small(model), x, covariance=covariance)(x)
    torch.testing.assert_close(g.mean, model(x).detach())
    assert g.variance.max() > 0


def test_layers_that_nothing_random_reaches_stay_whole() -> None:
    def ops(random: set[str] | None) -> list[str]:
        graph = trace(model, x, open_sequence=True, random=random).graph
        return [str(n.target) for n in graph.nodes if "lstm" in str(n.target)]

    model = nn.Sequential(build("LSTM"), nn.Linear(3, 2, dtype=F64), nn.LSTM(2, 2, dtype=F64, batch_first=True)).eval()
    x = sequence(3, STEPS, 4)
    assert len(ops({"2.bias_ih_l0"})) == 1 and len(ops({"0.layer.bias_ih_l0"})) == 0
    assert len(ops(set())) == 2 and len(ops(None)) == 0


def test_dropout_between_layers_in_training_mode() -> None:
    model, x = deepcopy(build("LSTM", num_layers=2, dropout=0.5)).train(), sequence(3, STEPS, 4)
    with pytest.raises(pg.InputError, match=r"training mode.*model\.eval\(\)"):
        pg.streamline(model, small(model), x)
