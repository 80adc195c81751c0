"""The user's model is never touched, and what happens to it later does not reach the net."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import propagauss as pg
from engines.models import MODELS, build, inputs, mlp, posterior_for


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "keys": [list(model.state_dict()), [n for n, _ in (*model.named_parameters(), *model.named_buffers())]],
        "identity": [id(t) for t in (*model.parameters(), *model.buffers())],
        "versions": [t._version for t in (*model.parameters(), *model.buffers())],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "mode": [m.training for m in model.modules()],
        "modules": [id(m) for m in model.modules()],
        "hooks": [
            len(hooks)
            for m in model.modules()
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "device": [t.device for t in model.parameters()],
    }


@pytest.mark.parametrize(
    "name", ["MLP", "in-place", "normalised", "tied twice", "buffers", "frozen", "own parameters", "nested outputs"]
)
def test_the_model_is_untouched(name: str) -> None:
    model, x = build(name), inputs(name)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    given = [v.clone() for v in x]
    before = snapshot(model)
    net = pg.streamline(model, posterior_for(model, "diagonal", MODELS[name].names), x, covariance="full")
    net(*x)
    after = snapshot(model)
    for key in ("keys", "identity", "versions", "requires_grad", "mode", "modules", "hooks", "attributes", "device"):
        assert before[key] == after[key], key
    assert all(torch.equal(before["state"][k], after["state"][k]) for k in before["state"])
    for a, b in zip(before["grad"], after["grad"], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(given, x, strict=True))


def test_hooks_and_training_mode_are_left_alone() -> None:
    """Where training mode makes no difference it is kept; a hook on the model stays, and sees no real forward."""
    model = mlp(nn.ReLU()).train()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(type(out)))
    net = pg.streamline(model, posterior_for(model, "diagonal"), torch.randn(2, 3))
    assert model.training and model[0].training and len(model[0]._forward_hooks) == 1
    before = len(seen)
    net(torch.randn(2, 3))
    assert len(seen) == before and torch.Tensor not in seen


def test_later_training_does_not_change_the_net() -> None:
    model, x = build("normalised"), inputs("normalised")
    net = pg.streamline(model, posterior_for(model, "diagonal"), x)
    expected = net(*x)
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model(*x).square().sum().backward()
    optimiser.step()
    model.eval()
    assert torch.equal(net(*x).mean, expected.mean) and torch.equal(net(*x).variance, expected.variance)
    assert not torch.allclose(model(*x), expected.mean)


def test_later_changes_of_the_posterior_do_not_change_the_net() -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    variances = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    net = pg.streamline(model, pg.DiagonalPosterior(variances), x)
    expected = net(x).variance
    for v in variances.values():
        v.mul_(9.0)
    assert torch.equal(net(x).variance, expected)
