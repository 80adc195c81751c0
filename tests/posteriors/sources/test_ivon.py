"""from_ivon against the real ivon-opt."""

import copy

import pytest
import torch
from torch import nn

from propagauss.errors import PosteriorError
from propagauss.posteriors import from_ivon

ivon = pytest.importorskip("ivon")
pytestmark = pytest.mark.peer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer, steps: int = 5) -> None:
    x, y = torch.randn(16, 3), torch.randint(0, 2, (16,))
    for _ in range(steps):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def stddev_of_samples(model: nn.Module, optimizer, count: int = 4000) -> dict[str, torch.Tensor]:
    """Standard deviations of the parameters that IVON itself draws: an account of the order that owes us nothing."""
    draws: dict[str, list[torch.Tensor]] = {n: [] for n, _ in model.named_parameters()}
    for _ in range(count):
        with optimizer.sampled_params():
            for n, p in model.named_parameters():
                draws[n].append(p.detach().clone())
    return {n: torch.stack(d).std(0) for n, d in draws.items()}


def test_variance_is_that_of_ivons_own_samples():
    model = network()
    parameters = list(model.parameters())
    groups = [{"params": parameters[2:], "ess": 50.0}, {"params": parameters[:2], "weight_decay": 0.3}]  # not in order
    optimizer = ivon.IVON(groups, lr=0.1, ess=200.0, weight_decay=0.01)
    train(model, optimizer)
    for group in optimizer.param_groups:  # every entry its own variance, over a range of 100
        group["hess"] = torch.logspace(-1, 1, group["hess"].numel())[torch.randperm(group["hess"].numel())]
    posterior = from_ivon(optimizer, model)
    assert posterior.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    for name, stddev in stddev_of_samples(model, optimizer).items():
        torch.testing.assert_close(posterior.variance(name).sqrt(), stddev, rtol=0.08, atol=0.0)


def test_every_entry_in_its_place():
    model = network()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=10.0, weight_decay=0.5)
    (group,) = optimizer.param_groups
    group["hess"] = torch.arange(group["hess"].numel()).float()
    posterior, start = from_ivon(optimizer, model), 0
    for name, p in model.named_parameters():
        hess = torch.arange(start, start + p.numel()).float().reshape(p.shape)
        torch.testing.assert_close(posterior.variance(name), 1 / (10 * (hess + 0.5)))
        start += p.numel()
    assert posterior.details == {"prior_precision": 5.0}


def test_parameters_without_a_group_are_deterministic():
    model = network()
    optimizer = ivon.IVON(model[2].parameters(), lr=0.1, ess=100.0)
    assert from_ivon(optimizer, model).names == ("2.weight", "2.bias")
    # a part of what is trained keeps its own names, and its own place in the flat vector
    whole = ivon.IVON(model.parameters(), lr=0.1, ess=100.0)
    whole.param_groups[0]["hess"] = torch.rand(26) + 0.1
    part = from_ivon(whole, model[2])
    assert part.names == ("weight", "bias")
    torch.testing.assert_close(part.variance("weight"), from_ivon(whole, model).variance("2.weight"))


def test_inside_sampled_params_the_variances_are_the_same():
    model = network()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=100.0)
    train(model, optimizer)
    outside = from_ivon(optimizer, model)
    with optimizer.sampled_params():
        inside = from_ivon(optimizer, model)
    torch.testing.assert_close(outside.to_dense(), inside.to_dense())


def test_after_a_checkpoint_and_in_double():
    model = network().double()
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=100.0)
    optimizer.param_groups[0]["hess"] = torch.rand(26).double() + 0.1
    again = ivon.IVON(model.parameters(), lr=0.1, ess=100.0)
    again.load_state_dict(optimizer.state_dict())
    posterior = from_ivon(again, model)
    assert posterior.dtype == torch.float64 and posterior.shape("0.weight") == (4, 3)
    torch.testing.assert_close(posterior.to_dense(), from_ivon(optimizer, model).to_dense())


def test_what_cannot_be_read():
    model = network()
    with pytest.raises(PosteriorError, match=r"reads the IVON optimiser.*got Adam"):
        from_ivon(torch.optim.Adam(model.parameters()), model)
    optimizer = ivon.IVON(model.parameters(), lr=0.1, ess=100.0)
    with pytest.raises(PosteriorError, match=r"none of the model's parameters.*not a copy"):
        from_ivon(optimizer, copy.deepcopy(model))
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(PosteriorError, match="have changed"):
        from_ivon(optimizer, model)
