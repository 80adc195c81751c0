"""The networks on which calibration is compared: an MLP, a residual CNN, a small vision transformer, a text model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from experiments.datasets import Pair, batches, images
from experiments.frame.experiment import Context
from experiments.mnist.networks import laplace, map_network
from experiments.tasks import calibration_text
from experiments.tasks.ood import as_seen
from experiments.transformers import vit_networks
from propagauss.posteriors import Posterior, fit_laplace, load_posterior

Kind = Literal["mlp", "cnn", "vit", "text"]
OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist", "mrpc": "wic"}
POINTS = {"full": 5000, "quick": 60}  # test images, and as many of the other set; fewer for the two large networks
FEWER = {"full": 1500, "quick": 30}
CNN: dict[str, Any] = {"width": 16, "epochs": 8, "batch": 64, "rate": 2e-3}


@dataclass(frozen=True)
class Subject:
    """A trained network, a Kronecker posterior over all of its layers that were trained, and data in three parts."""

    model: nn.Module
    posterior: Posterior
    validation: list[Pair]
    test: list[Pair]
    outliers: list[Pair]  # with labels that mean nothing
    lengths_differ: bool = False


def subject(context: Context, kind: Kind, name: str) -> Subject:
    if kind == "mlp":
        count = POINTS[context.mode]
        trained = map_network(context, name)
        outside = as_seen(trained, images(context, OTHER[name]).test[0][:count])
        x, y = trained.data.test
        parts = batches(trained.data.validation), batches((x[:count], y[:count])), _unlabelled(outside, 500)
        return Subject(trained.model, laplace(context, name, "kronecker"), *parts)
    if kind == "text":
        model, posterior, found = calibration_text.network(context)
        return Subject(model, posterior, *(part.batches() for part in found), lengths_differ=True)
    count = FEWER[context.mode]
    model, data = vit_networks.trained(context, name) if kind == "vit" else _cnn(context, name)
    x, y = data.test
    outside = images(context, OTHER[name]).test[0][:count]
    parts = batches(data.validation, 250), batches((x[:count], y[:count]), 250), _unlabelled(outside, 250)
    return Subject(model, _posterior(context, kind, name, model, data.train), *parts)


def _unlabelled(x: Tensor, size: int) -> list[Pair]:
    return batches((x, torch.zeros(len(x), dtype=torch.long)), size)


# -- the CNN


class Residual(nn.Module):
    """`x + conv(relu(conv(x)))`"""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


def network(classes: int, width: int, channels: int = 1) -> nn.Sequential:
    """Two stages of half the size each, a residual block in both, and the average over positions."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride=2, padding=1),
        nn.ReLU(),
        Residual(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        Residual(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, classes),
    )


def _cnn(context: Context, name: str) -> tuple[nn.Module, Any]:
    data = vit_networks.data(context, name)
    settings = CNN | ({"epochs": 1} if context.quick else {})
    model, path = network(data.classes, settings["width"]), _path(context, f"cnn-{name}", settings)
    if not path.is_file():
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(context.seed)
            model = network(data.classes, settings["width"])
            _train(model, data.train, settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    return model.eval(), data


def _train(model: nn.Module, train: Pair, settings: dict[str, Any]) -> None:
    x, y = train
    optimiser = torch.optim.Adam(model.parameters(), settings["rate"])
    for _ in tqdm(range(settings["epochs"]), desc="CNN", leave=False, disable=None):
        for rows in torch.randperm(len(x)).split(settings["batch"]):
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()


def _posterior(context: Context, kind: Kind, name: str, model: nn.Module, train: Pair) -> Posterior:
    size = sum(p.numel() for p in model.parameters())
    path = _path(context, f"{kind}-{name}-kronecker", {"parameters": size, "train": len(train[0]), "cnn": CNN})
    if not path.is_file():
        fit_laplace(model, batches(train, 250), structure="kronecker").save(path)
    return load_posterior(path)


def _path(context: Context, name: str, settings: Any) -> Any:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
    return context.cache / f"{name}-{context.mode}-{context.seed}-{digest}.safetensors"
