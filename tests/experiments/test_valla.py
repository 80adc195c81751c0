"""VaLLA's protocol: its training loop against autograd, and what is read off stored rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from experiments.valla import networks
from experiments.valla.methods import calibrations
from experiments.valla.summary import summaries
from experiments.valla.ways import CALIBRATIONS, Way, title
from propagauss.gaussian import Gaussian

HOW = {"hidden": [6, 5], "dropout": 0.0, "momentum": 0.5, "decay": 1e-2, "steps": 4, "batch": 8}


def test_training_is_sgd_with_momentum_and_decay():
    torch.manual_seed(0)
    model = networks.network(HOW, 7, 3)
    twin, x, y = copy.deepcopy(model).eval(), torch.randn(32, 7), torch.randint(3, (32,))
    torch.manual_seed(1)
    networks.train(model, (x, y), 0.3, HOW)
    torch.manual_seed(1)
    optimiser = torch.optim.SGD(twin.parameters(), 0.3, momentum=HOW["momentum"], weight_decay=HOW["decay"])
    for rows in torch.randperm(32).split(8):
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(x[rows]), y[rows]).backward()
        optimiser.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_calibrations_are_fitted_on_the_latents_given():
    torch.manual_seed(0)
    y = torch.randint(3, (300,))
    mean = 4 * nn.functional.one_hot(y, 3) + 4 * torch.randn(300, 3)  # too sure of itself
    found = calibrations([(Gaussian(mean, variance=torch.rand(300, 3)), y)], "probit")
    assert tuple(found) == CALIBRATIONS
    assert found["as it is"][0] == found["temperature"][0] == 1 and found["scale"][0] > 1
    assert float(found["temperature"][1].temperature) > 1 == float(found["scale"][1].temperature)


def test_seeds_are_averaged():
    row = vars(Way()) | {"nlpd": 0.5, "against": [0.1, 0.2]}
    records = {f"mnist-{k}": {"set": "mnist", "rows": [row | {"nlpd": 0.5 + k}]} for k in range(3)}
    summary = summaries(records)["mnist"]
    assert (
        summary.seeds == 3 and summary.mean(Way(), "nlpd") == 1.5 and summary.text(Way(), "nlpd") == "1.5000 ± 1.0000"
    )
    assert summary.gap(Way()) == pytest.approx((0.1, 0.2)) and summary.text(Way(), "variance") == ""
    assert title(Way("kronecker", "validation", "linearised", "mean_field", "calibrate")).count("validation") == 1
