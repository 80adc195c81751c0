"""The networks of selective prediction: MLPs, a residual CNN, and heads on MiniLM; each has two posteriors.

What is trained here is kept in the cache; the MLPs are those of the experiment `mnist`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets import Images, Pair, batches, images
from experiments.frame.experiment import Context
from experiments.methods.classify import Batches
from experiments.mnist import networks as mlps
from experiments.selective.texts import TASKS, pairs
from experiments.tasks.calibration_networks import network as cnn
from experiments.transformers.vit_networks import augmented
from propagauss.posteriors import Posterior, fit_laplace, from_ivon, load_posterior

EPOCHS = {"fashion_mnist": 10}  # of MAP, where not those of `mnist`: trained longer it is far too sure of itself
MEMBERS = 5  # of the ensemble: seeds 0 to 4, the network itself among them
HELD_OUT = 1000  # training images of CIFAR-10 for validation
TESTED = 2500  # test images of CIFAR-10
CNN: dict[str, Any] = {"width": 16, "epochs": 30, "batch": 64, "rate": 3e-3, "decay": 1e-4}
CNN_IVON: dict[str, Any] = {"epochs": 40, "batch": 64, "rate": 0.2, "prior_precision": 5.0, "hess_init": 0.1}
# Of a few settings tried, those of least loss on MRPC's validation pairs.
TEXT: dict[str, Any] = {"width": 64, "epochs": 2, "batch": 32, "rate": 1e-3, "decay": 1.0}
TEXT_IVON: dict[str, Any] = {"epochs": 5, "batch": 32, "rate": 0.3, "prior_precision": 500.0, "hess_init": 20.0}
QUICK: dict[str, Any] = {"epochs": 1}
QUICK_IMAGES = 200


@dataclass(frozen=True)
class Subject:
    """Networks for the same inputs: the centre of each posterior, and the members of an ensemble, its own first."""

    fitted: Mapping[str, tuple[nn.Module, Posterior]]  # "LA", "IVON"
    members: list[nn.Module]
    validation: Batches
    test: Batches


def subject(context: Context, name: str) -> Subject:
    if name == "cifar10":
        return _of_cnns(context)
    return _of_texts(context, name) if name in TASKS else _of_mlps(context, name)


def config(context: Context, name: str) -> dict[str, Any]:
    """What the networks of a set depend on."""
    if name == "cifar10":
        own: dict[str, Any] = {"cnn": CNN, "ivon": CNN_IVON, "test": TESTED}
    elif name in TASKS:
        own = {"head": TEXT, "ivon": TEXT_IVON}
    else:
        own = {"map": mlps.MAP, "ivon": mlps.IVON} | ({"epochs": EPOCHS[name]} if name in EPOCHS else {})
    return own | {"members": MEMBERS} | ({"quick": QUICK} if context.quick else {})


def _seeds(context: Context) -> tuple[int, ...]:
    """Of the ensemble, that of the network itself first."""
    return (context.seed, *(s for s in range(2 if context.quick else MEMBERS) if s != context.seed))


def _settings(context: Context, *settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [each | (QUICK if context.quick else {}) for each in settings]


# -- MLPs


def _of_mlps(context: Context, name: str) -> Subject:
    epochs = None if context.quick else EPOCHS.get(name)
    members = [mlps.map_network(replace(context, seed=seed), name, epochs) for seed in _seeds(context)]
    ivon, mean_field = mlps.ivon_network(context, name)
    data = members[0].data
    fitted = {
        "LA": (members[0].model, mlps.laplace(context, name, "kronecker", epochs)),
        "IVON": (ivon.model, mean_field),
    }
    return Subject(fitted, [m.model for m in members], batches(data.validation), batches(data.test))


# -- CNNs


def _of_cnns(context: Context) -> Subject:
    data, (how, ivon) = _cifar(context), _settings(context, CNN, CNN_IVON)
    count = len(data.train[0])

    def member(seed: int) -> nn.Module:
        model = cnn(data.classes, how["width"], channels=3)
        kept(replace(context, seed=seed), "cnn-cifar10", [how, count], model, lambda m: _train(m, data.train, how))
        return model

    def fit(model: nn.Module) -> Posterior:
        return fit_laplace(model, batches(data.train, 250), structure="kronecker")

    def train(model: nn.Module) -> Posterior:
        return fit_ivon(model, lambda: _shuffled(data.train, ivon["batch"]), count, ivon)

    members = [member(seed) for seed in _seeds(context)]
    laplace = kept(context, "cnn-cifar10-laplace", [how, count], members[0], fit)
    centre = cnn(data.classes, how["width"], channels=3)
    mean_field = kept(context, "cnn-cifar10-ivon", [how, ivon, count], centre, train)
    assert laplace is not None and mean_field is not None
    fitted = {"LA": (members[0], laplace), "IVON": (centre, mean_field)}
    return Subject(fitted, members, batches(data.validation, 250), batches(data.test, 250))


def _cifar(context: Context) -> Images:
    data = images(context, "cifar10", HELD_OUT)
    if not context.quick:
        return replace(data, test=(data.test[0][:TESTED], data.test[1][:TESTED]))
    parts = (data.train, data.validation, data.test)
    train, validation, test = ((x[:QUICK_IMAGES], y[:QUICK_IMAGES]) for x, y in parts)
    return Images(train, validation, test, data.classes)


def _train(model: nn.Module, train: Pair, how: Mapping[str, Any]) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), how["rate"], weight_decay=how["decay"], fused=True)
    total = how["epochs"] * math.ceil(len(train[0]) / how["batch"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, how["rate"], total, pct_start=0.1)
    for _ in range(how["epochs"]):
        for x, y in _shuffled(train, how["batch"]):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
            schedule.step()


def _shuffled(train: Pair, size: int) -> Iterator[Pair]:
    """Batches in random order; images shifted and mirrored at random."""
    for rows in torch.randperm(len(train[0])).split(size):
        x = train[0][rows]
        yield augmented(x) if x.dim() == 4 else x, train[1][rows]


# -- texts


def head(inputs: int, classes: int) -> nn.Sequential:
    """The norm has no parameters of its own, so that all of the head's are random."""
    width = TEXT["width"]
    norm = nn.LayerNorm(width, elementwise_affine=False)
    return nn.Sequential(nn.Linear(inputs, width), norm, nn.GELU(), nn.Linear(width, classes))


def _of_texts(context: Context, task: str) -> Subject:
    data, (how, ivon) = pairs(context, task), _settings(context, TEXT, TEXT_IVON)
    inputs, count = data.train[0].shape[1], len(data.train[0])

    def member(seed: int) -> nn.Module:
        model = head(inputs, data.classes)
        kept(replace(context, seed=seed), f"head-{task}", how, model, lambda m: _train(m, data.train, how))
        return model

    def fit(model: nn.Module) -> Posterior:
        return fit_laplace(model, batches(data.train), structure="kronecker")

    def train(model: nn.Module) -> Posterior:
        return fit_ivon(model, lambda: _shuffled(data.train, ivon["batch"]), count, ivon)

    members = [member(seed) for seed in _seeds(context)]
    laplace = kept(context, f"head-{task}-laplace", how, members[0], fit)
    centre = head(inputs, data.classes)
    mean_field = kept(context, f"head-{task}-ivon", [how, ivon], centre, train)
    assert laplace is not None and mean_field is not None
    fitted = {"LA": (members[0], laplace), "IVON": (centre, mean_field)}
    return Subject(fitted, members, batches(data.validation), batches(data.test))


# -- mean fields, and the cache


def fit_ivon(model: nn.Module, epoch: Callable[[], Iterator[Pair]], count: int, how: Mapping[str, Any]) -> Posterior:
    """`N(w; m, diag(v))` over all parameters; their means are left in the model."""
    import ivon

    options = {"hess_init": how["hess_init"], "beta2": 0.9999, "weight_decay": how["prior_precision"] / count}
    optimiser = ivon.IVON(model.parameters(), how["rate"], ess=count, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, how["epochs"])
    for _ in range(how["epochs"]):
        for x, y in epoch():
            with optimiser.sampled_params(train=True):
                optimiser.zero_grad()
                F.cross_entropy(model(x), y).backward()
            optimiser.step()
        schedule.step()
    return from_ivon(optimiser, model)


def kept(
    context: Context, name: str, stamp: Any, model: nn.Module, fit: Callable[[nn.Module], Posterior | None]
) -> Posterior | None:
    """What `fit` made of the model, in place, and the posterior that it returned: from the cache if it is there."""
    digest = hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:10]
    path = context.cache / f"{name}-{context.mode}-{context.seed}-{digest}.safetensors"
    beside = path.with_suffix(".posterior.safetensors")
    if not path.is_file():
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(context.seed)
            posterior = fit(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        if posterior is not None:
            posterior.save(beside)
        _save(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    model.eval()
    return load_posterior(beside) if beside.is_file() else None


def _save(weights: Mapping[str, Tensor], path: Path) -> None:
    """Last, and whole: its presence says that all is there."""
    temporary = path.with_suffix(".part")
    save_file({name: w.detach().contiguous() for name, w in weights.items()}, temporary)
    temporary.replace(path)
