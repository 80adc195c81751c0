"""The 784-200-200-10 tanh networks of VaLLA's protocol, trained once and kept in the cache.

Pixels are in [0, 1]. VaLLA's repository does not have the learning rate: for each set, of `rates` the one is taken
whose network (with the first seed) has the least loss on the validation images.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from experiments.datasets import Images, Pair, batches, images
from experiments.frame.experiment import Context
from propagauss.posteriors import Posterior, fit_laplace, load_posterior

FULL: dict[str, Any] = {
    "hidden": [200, 200],
    "dropout": 0.1,
    "momentum": 0.5,
    "decay": 1e-3,
    "steps": 20_000,
    "batch": 100,
    "train": 55_000,
    "validation": 5000,
    "test": 10_000,
    "rates": [0.03, 0.1, 0.3],
}
QUICK = FULL | {"steps": 30, "train": 400, "validation": 100, "test": 100, "rates": [0.1, 0.3]}
POSTERIORS: dict[str, dict[str, Any]] = {  # options of `fit_laplace`
    "kronecker": {"structure": "kronecker"},
    "diagonal": {"structure": "diagonal"},
    "last layer": {"structure": "kronecker", "parameters": "6.*"},
}


@dataclass(frozen=True)
class Trained:
    """A network in evaluation mode, its data, its learning rate, and the validation loss of every rate tried."""

    model: nn.Sequential
    data: Images
    rate: float
    tried: dict[str, float]


def settings(context: Context) -> dict[str, Any]:
    return QUICK if context.quick else FULL


def data(context: Context, name: str) -> Images:
    """Flat images; the last of the training part for validation."""
    sizes = settings(context)
    whole = images(context, name, FULL["validation"]).flat()
    parts = ((whole.train, "train"), (whole.validation, "validation"), (whole.test, "test"))
    cut = [(x[: sizes[part]], y[: sizes[part]]) for (x, y), part in parts]
    return Images(cut[0], cut[1], cut[2], whole.classes)


def network(how: Mapping[str, Any], inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """Layers with tanh and dropout after each but the last."""
    sizes, parts = [inputs, *how["hidden"]], []
    for before, after in itertools.pairwise(sizes):
        parts += [nn.Linear(before, after), nn.Tanh(), nn.Dropout(how["dropout"])]
    return nn.Sequential(*parts, nn.Linear(sizes[-1], classes))


def trained(context: Context, name: str, seed: int) -> Trained:
    """The network of a seed, at the rate that was chosen with the first seed."""
    how, found = settings(context), data(context, name)
    tried = {rate: loss(_kept(context, name, context.seed, rate, found), found.validation) for rate in how["rates"]}
    best = min(tried, key=lambda rate: tried[rate])
    model = _kept(context, name, seed, best, found)
    return Trained(model, found, best, {f"{rate:g}": value for rate, value in tried.items()})


def laplace(context: Context, name: str, seed: int, kind: str, given: Trained) -> Posterior:
    """From all training images; prior precision by marginal likelihood."""
    path = _path(context, f"{name}-{seed}-{given.rate:g}-{kind.replace(' ', '-')}", POSTERIORS[kind])
    if not path.is_file():
        fit_laplace(given.model, batches(given.data.train), progress=False, **POSTERIORS[kind]).save(path)
    return load_posterior(path)


@torch.no_grad()
def loss(model: nn.Module, pair: Pair) -> float:
    return F.cross_entropy(model(pair[0]), pair[1]).item()


def _kept(context: Context, name: str, seed: int, rate: float, found: Images) -> nn.Sequential:
    """From the cache, or trained and put there."""
    how = settings(context)
    path = _path(context, f"{name}-{seed}-{rate:g}", {})
    model = network(how, found.train[0].shape[1], found.classes)
    if not path.is_file():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = network(how, found.train[0].shape[1], found.classes)
            train(model, found.train, rate, how)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    return model.eval()


@torch.no_grad()
def train(model: nn.Sequential, pair: Pair, rate: float, how: Mapping[str, Any]) -> None:
    """SGD with momentum on the mean cross-entropy, in place; written-out gradients save a third of the time.

    `a_i = keep_i tanh(W_i a_{i-1} + b_i)`: `g_i = (g_{i+1} W_{i+1}) keep_i (1 - tanh²)`, `dW_i = g_iᵀ a_{i-1}`.
    """
    x, y = pair
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    weights = [(layer.weight.data, layer.bias.data) for layer in layers]
    moments = [(torch.zeros_like(w), torch.zeros_like(b)) for w, b in weights]
    keep, size = 1 - how["dropout"], how["batch"]
    order = torch.empty(0, dtype=torch.long)
    for _ in tqdm(range(how["steps"]), desc=f"rate {rate:g}", leave=False, disable=None):
        if len(order) < size:
            order = torch.randperm(len(x))
        rows, order = order[:size], order[size:]
        inputs, slopes = [x[rows]], []
        for w, b in weights[:-1]:
            h = torch.addmm(b, inputs[-1], w.T).tanh_()
            kept = torch.empty_like(h).bernoulli_(keep).div_(keep)
            slopes.append((1 - h * h) * kept)
            inputs.append(h * kept)
        w, b = weights[-1]
        g = torch.addmm(b, inputs[-1], w.T).softmax(1)
        g[torch.arange(size), y[rows]] -= 1
        g /= size
        for i in reversed(range(len(weights))):
            gradients = (g.T @ inputs[i], g.sum(0))
            if i:
                g = (g @ weights[i][0]) * slopes[i - 1]
            for value, moment, gradient in zip(weights[i], moments[i], gradients, strict=True):
                moment.mul_(how["momentum"]).add_(gradient).add_(value, alpha=how["decay"])
                value.sub_(moment, alpha=rate)


def _path(context: Context, name: str, extra: Mapping[str, Any]) -> Path:
    kept = {key: value for key, value in settings(context).items() if key != "rates"} | dict(extra)
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]
    return context.cache / f"valla-{name}-{context.mode}-{digest}.safetensors"
