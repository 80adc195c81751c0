"""The net as a module: plan, code, state, copies, casts, and large batches in parts."""

from __future__ import annotations

import copy
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn

import propagauss as pg
from engines.models import build, inputs, mlp, posterior_for


def test_plan_is_a_table() -> None:
    model, x = build("skip"), inputs("skip")
    plan = pg.streamline(model, posterior_for(model, "diagonal"), x).plan
    *lines, pointer = str(plan).splitlines()
    assert len(lines) == len(plan) + 3  # header, rule, summary
    assert "pg.tasks.fidelity" in pointer and "pg.linearise" in pointer  # since a sum counts as independent
    for column in ("module", "op", "rule", "covariance", "shape"):
        assert column in lines[0]
    assert [s.path for s in plan if s.op == "aten.linear"] == ["first", "second", "out"]
    assert any(line.startswith("first ") and "aten.linear" in line and "B x 4" in line for line in lines)
    assert "random parameters" in lines[-1] and "6" in lines[-1]
    assert {s.structure for s in plan} == {"diagonal"}
    assert all(s.note for s in plan if s.op == "aten.add.Tensor")  # a residual sum says what it assumes


def test_plan_shows_nested_paths() -> None:
    model, x = build("nested"), inputs("nested")
    plan = pg.streamline(model, posterior_for(model, "diagonal"), x, covariance="full").plan
    assert "1.0.2" in str(plan) and "1.1.1" in str(plan)
    assert {s.structure for s in plan} == {"full"}


def test_code_and_repr_are_readable() -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    net = pg.streamline(model, posterior_for(model, "diagonal"), x)
    assert "def forward" in net.code and "relu" in net.code
    assert "4 random parameters" in repr(net)
    assert not list(net.parameters()) and not net.training


@pytest.mark.parametrize(
    "name, kind, covariance",
    [
        ("MLP", "diagonal", "diagonal"),
        ("MLP", "kronecker", "full"),
        ("MLP", "full", "diagonal"),
        ("own parameters", "full", "full"),
        ("buffers", "diagonal", "diagonal"),
        ("normalised", "kronecker", "full"),
    ],
)
def test_state_dict_holds_everything(name: str, kind: str, covariance: str) -> None:
    """Loaded into a net of the same model with other weights, it becomes the same net."""
    model, x = build(name), inputs(name)
    other = build(name)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
        for b in other.buffers():
            if b.is_floating_point():
                b.add_(0.5)
    net = pg.streamline(model, posterior_for(model, kind), x, covariance=covariance)
    second = pg.streamline(other, posterior_for(other, kind, scale=3.0), x, covariance=covariance)
    expected = net(*x)
    assert not torch.allclose(second(*x).mean, expected.mean)
    file = BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    assert torch.equal(second(*x).mean, expected.mean)
    assert torch.equal(second(*x).covariance, expected.covariance)


def test_deepcopy_is_independent() -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    net = pg.streamline(model, posterior_for(model, "kronecker"), x, covariance="full")
    expected = net(x)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x).mean, expected.mean) and torch.equal(twin(x).covariance, expected.covariance)
    with torch.no_grad():
        for b in twin.buffers():
            b.zero_()
    assert torch.equal(net(x).covariance, expected.covariance)


@pytest.mark.parametrize("kind, covariance", [("diagonal", "diagonal"), ("kronecker", "full")])
@pytest.mark.parametrize("activation", ["linearise", "moments"])
def test_casting_a_net(kind: str, covariance: str, activation: str) -> None:
    """`net.to(torch.float64)` takes double inputs from then on, and says so to others."""
    model, (x,) = mlp(nn.Tanh()).eval(), torch.randn(1, 4, 3)
    net = pg.streamline(model, posterior_for(model, kind), x, covariance=covariance, activation=activation)
    expected = net(x)
    net = net.to(torch.float64)
    g = net(x.double())
    assert g.mean.dtype == g.variance.dtype == torch.float64
    torch.testing.assert_close(g.mean.float(), expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(g.covariance.float(), expected.covariance, rtol=1e-3, atol=1e-5)
    with pytest.raises(pg.InputError, match="float32"):
        net(x)


# -- full covariance, a few samples at a time


def test_a_batch_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of joint covariances is bounded: large batches go through in parts, with the same result."""
    monkeypatch.setattr(
        "propagauss.network.streamlined.WORKING_BYTES", 4 * 4 * 6**2 * 3
    )  # room for three samples of six entries
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    random = pg.DiagonalPosterior({n: 0.01 * torch.ones_like(p) for n, p in model.named_parameters()})
    mean, variance = torch.randn(8, 4, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)
    for x in (mean, pg.Gaussian(mean, variance=variance), pg.Gaussian(mean, covariance=torch.diag_embed(variance))):
        net = pg.streamline(model, random, x, covariance="full")
        sizes: list[int] = []
        monkeypatch.setattr(net.body, "forward", _counting(net.body.forward, sizes))
        parts, whole = net(x), net._whole(net.leaves(x))[0]
        assert sizes == [3, 3, 2, 8]
        torch.testing.assert_close(parts.mean, whole.mean)
        torch.testing.assert_close(parts.covariance, whole.covariance)


def _counting(forward: Any, sizes: list[int]) -> Any:
    def counted(x: Any) -> Any:
        sizes.append(x.shape[0])
        return forward(x)

    return counted


class Heads(nn.Module):
    """Its shape has a size that none of no samples tells: `-1`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh().reshape(x.shape[0], 2, -1))


@pytest.mark.parametrize("make", [pg.streamline, pg.linearise])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_no_samples(make: Any, covariance: str) -> None:
    model, x = Heads().eval(), torch.randn(3, 4)
    net = make(model, posterior_for(model, "diagonal"), x, covariance=covariance)
    found = net(x[:0])
    assert found.mean.shape == found.variance.shape == (0, 2, 2) and found.covariance.shape == (0, 4, 4)
    assert pg.Regressor(net, noise=1.0)(x[:0]).mean.shape == (0, 2, 2)


@pytest.mark.parametrize("make", [pg.streamline, pg.linearise])
def test_messages_say_how_the_net_was_made(make: Any) -> None:
    model, x = Heads().eval(), torch.randn(3, 4)
    net = make(model, posterior_for(model, "diagonal"), x)
    with pytest.raises(pg.InputError, match=f"{make.__name__} again with an example of this shape"):
        net(torch.randn(3, 5))
    with pytest.raises(pg.InputError, match=f"this network was {make.__name__}d for 1 positional input"):
        net(x, x)
