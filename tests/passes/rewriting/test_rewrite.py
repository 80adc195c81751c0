"""Ops without a rule, rules of one's own, and rules that fail."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from engines.test_bad_input import X, diagonal, refuse, variances
from propagauss.rules import FUNCTIONS


@torch.library.custom_op("pgtest::ranked", mutates_args=())
def ranked(x: Tensor) -> Tensor:
    return x.sort(-1).values.clone()


@torch.library.custom_op("pgtest::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


for op in (ranked, doubled):
    op.register_fake(lambda x: torch.empty_like(x))


class Exotic(nn.Module):
    def __init__(self, op: Callable[[Tensor], Tensor]):
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


def exotic() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), Exotic(ranked), nn.Linear(4, 4), nn.Sequential(Exotic(doubled)), Exotic(ranked)
    )


def test_unsupported_ops_are_reported_together() -> None:
    message = refuse(exotic(), None, error=pg.UnsupportedOpError)
    for op, path in (("pgtest.ranked", "body.1"), ("pgtest.doubled", "body.3.0"), ("pgtest.ranked", "body.4")):
        assert any(op in line and f"'{path}'" in line for line in message.splitlines()), (op, path)
    assert "propagauss.rule(" in message and "posterior" in message


def test_unsupported_ops_before_any_uncertainty_do_not_matter() -> None:
    model = exotic()
    posterior = pg.DiagonalPosterior({"2.weight": torch.ones(4, 4)})
    with pytest.raises(pg.UnsupportedOpError) as caught:
        pg.streamline(model, posterior, X)
    assert "'1'" not in str(caught.value) and "'4'" in str(caught.value)
    front = model[:3]
    assert (pg.streamline(front, posterior, X)(X).variance > 0).all()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_registering_a_rule_makes_it_work(covariance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overload = torch.ops.pgtest.doubled.default
    monkeypatch.setitem(FUNCTIONS, overload, None)  # so that the registry is as before after the test

    @pg.rule(overload, note="twice as much")
    def rule_of_doubled(x: pg.Gaussian) -> pg.Gaussian:
        return x.scaled(2 * x.mean, torch.tensor(2.0))

    model = nn.Sequential(nn.Linear(3, 4), Exotic(doubled))
    net = pg.streamline(model, diagonal(model), X, covariance=covariance)
    plain = pg.streamline(model[:1], pg.DiagonalPosterior(variances(model)), X, covariance=covariance)
    torch.testing.assert_close(net(X).mean, model(X).detach())
    torch.testing.assert_close(net(X).covariance, 4 * plain(X).covariance)
    assert "twice as much" in str(net.plan) and "rule_of_doubled" in str(net.plan)


def test_rule_wants_an_overload() -> None:
    with pytest.raises(pg.PropagaussError, match=r"pgtest\.doubled\.default"):
        pg.rule(torch.ops.pgtest.doubled)(lambda x: x)
    assert torch.ops.pgtest.doubled not in FUNCTIONS


def test_a_rule_that_fails_is_named_when_streamlining(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is tried on the example, with the op's own derivative where a rule fails; here there is none."""
    overload = torch.ops.pgtest.doubled.default
    monkeypatch.setitem(FUNCTIONS, overload, None)

    @pg.rule(overload)
    def rule_of_doubled(x: pg.Gaussian) -> pg.Gaussian:
        raise ZeroDivisionError("no such luck")

    model = nn.Sequential(nn.Linear(3, 4), Exotic(doubled))
    with pytest.raises(pg.UnsupportedOpError, match=r"pgtest\.doubled at '1'"):
        pg.streamline(model, diagonal(model), X)


@torch.library.custom_op("pgtest::cubed", mutates_args=(), tags=(torch.Tag.pointwise,))
def cubed(x: Tensor) -> Tensor:
    return x**3


cubed.register_fake(lambda x: torch.empty_like(x))
cubed.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("activation", ["linearise", "moments"])
def test_a_custom_op_that_is_tagged_elementwise(covariance: str, activation: str) -> None:
    """The forward derivative of a custom op is zero without a word; it must not end as no variance."""
    model = nn.Sequential(nn.Linear(3, 4), Exotic(cubed)).double().eval()
    x, small = X.double(), pg.DiagonalPosterior({n: 1e-8 * torch.rand_like(p) for n, p in model.named_parameters()})
    got = pg.streamline(model, small, x, covariance=covariance, activation=activation)(x)  # type: ignore[arg-type]
    layer = pg.streamline(model[:1], small, x)(x)
    torch.testing.assert_close(got.variance, layer.variance * (3 * layer.mean**2) ** 2, rtol=1e-5, atol=0)
