"""The 784-128-64-C networks of the paper's classification experiments, trained once and kept in the cache.

    MAP:  minimum of `Σ -log p(y | x, w) + δ/2 ‖w‖²` by Adam, step size on a cosine
    MFVI: `N(w; m, diag(v))` by IVON with the same prior

What is kept is named by data set, mode, seed and a hash of all settings, so a change of any of them trains again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from experiments.datasets import Images, Pair, batches, images
from experiments.frame.experiment import Context
from propagauss.demo.report.files import write
from propagauss.demo.training import mlp
from propagauss.posteriors import Posterior, fit_laplace, from_ivon, load_posterior

HIDDEN = (128, 64)
QUICK = {"train": 300, "held_out": 60, "epochs": 1}
# Batch size, rate, decay and epochs of MAP are those that the paper gives for its other MLP on MNIST (sensitivity);
# it gives none for these. The decay, 1e-5 of the mean loss over 50,000 images, is a prior precision of 0.5.
MAP = {"rate": 1e-3, "batch": 64, "epochs": 50, "prior_precision": 0.5, "schedule": "cosine"}
# Of four settings tried, the one of least NLPD of sampling on MNIST's validation images.
IVON = {"rate": 0.2, "batch": 64, "epochs": 20, "prior_precision": 5.0, "schedule": "cosine"}
IVON |= {"hess_init": 0.05, "beta2": 0.9999}


@dataclass(frozen=True)
class Trained:
    """A network in evaluation mode, and the data it belongs to: flat, standardised by the training pixels."""

    model: nn.Sequential
    data: Images
    details: dict[str, Any]  # settings, and how the training ended


def standardised(context: Context, name: str) -> Images:
    """Flat images; all pixels by one mean and one standard deviation. A quick run takes a few of each part."""
    data = images(context, name).flat()
    if context.quick:
        few, rest = QUICK["train"], QUICK["held_out"]
        data = Images(_some(data.train, few), _some(data.validation, rest), _some(data.test, rest), data.classes)
    mean, stddev = data.train[0].mean(), data.train[0].std()
    train, validation, test = (((x - mean) / stddev, y) for x, y in (data.train, data.validation, data.test))
    return Images(train, validation, test, data.classes)


def map_network(context: Context, name: str, epochs: int | None = None) -> Trained:
    """The network at the maximum a posteriori; `epochs` if it shall be trained for another time than in `MAP`."""
    data, settings = standardised(context, name), _settings(context, MAP) | ({"epochs": epochs} if epochs else {})
    kept = _Kept(context, name, "map", data, settings)
    if not kept.complete:
        with _seeded(context.seed):
            model = _network(data)
            details = settings | _train_map(model, data, settings)
        kept.put(model, details)
    return kept.trained(data)


def ivon_network(context: Context, name: str) -> tuple[Trained, Posterior]:
    """The network at the mean of a mean-field posterior, and that posterior."""
    data, settings = standardised(context, name), _settings(context, IVON)
    kept = _Kept(context, name, "ivon", data, settings)
    if not kept.complete:
        with _seeded(context.seed):
            model = _network(data)
            posterior, ended = _train_ivon(model, data, settings)
        kept.put(model, settings | ended, posterior)
    return kept.trained(data), load_posterior(kept.path("posterior.safetensors"))


def laplace(
    context: Context, name: str, structure: Literal["diagonal", "kronecker"], epochs: int | None = None
) -> Posterior:
    """Laplace posterior around `map_network`, from all training images; prior precision by marginal likelihood."""
    trained = map_network(context, name, epochs)
    kept = _Kept(context, name, f"laplace-{structure}", trained.data, trained.details)
    file = kept.path("posterior.safetensors")
    if not file.is_file():
        fit_laplace(trained.model, batches(trained.data.train), structure=structure).save(file)
    return load_posterior(file)


# -- training


def _network(data: Images) -> nn.Sequential:
    return mlp([data.train[0].shape[1], *HIDDEN, data.classes])


def _train_map(model: nn.Module, data: Images, settings: Mapping[str, Any]) -> dict[str, float]:
    decay = settings["prior_precision"] / len(data.train[0])
    optimiser = torch.optim.Adam(model.parameters(), settings["rate"], weight_decay=decay, fused=True)
    for x, y in _steps(data.train, optimiser, settings, "MAP"):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return _losses(model, data)


def _train_ivon(model: nn.Module, data: Images, settings: Mapping[str, Any]) -> tuple[Posterior, dict[str, float]]:
    import ivon

    count = len(data.train[0])
    options = {key: settings[key] for key in ("hess_init", "beta2")}
    decay = settings["prior_precision"] / count
    optimiser = ivon.IVON(model.parameters(), settings["rate"], ess=count, weight_decay=decay, **options)
    for x, y in _steps(data.train, optimiser, settings, "IVON"):
        with optimiser.sampled_params(train=True):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return from_ivon(optimiser, model), _losses(model, data)


def _steps(train: Pair, optimiser: torch.optim.Optimizer, settings: Mapping[str, Any], what: str) -> Iterator[Pair]:
    """Batches in random order, epoch after epoch, with the step size on a cosine."""
    x, y = train
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, settings["epochs"])
    for _ in tqdm(range(settings["epochs"]), desc=what, leave=False, disable=None):
        for rows in torch.randperm(len(x)).split(settings["batch"]):
            yield x[rows], y[rows]
        schedule.step()


@torch.no_grad()
def _losses(model: nn.Module, data: Images) -> dict[str, float]:
    parts = {"train": data.train, "validation": data.validation}
    return {f"{part}_loss": F.cross_entropy(model(x), y).item() for part, (x, y) in parts.items()}


def _settings(context: Context, full: Mapping[str, Any]) -> dict[str, Any]:
    return dict(full) | ({"epochs": QUICK["epochs"]} if context.quick else {})


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _some(pair: Pair, count: int) -> Pair:
    """A random choice (some files are sorted), always the same."""
    rows = torch.randperm(len(pair[0]), generator=torch.Generator().manual_seed(0))[:count]
    return pair[0][rows], pair[1][rows]


# -- the cache


class _Kept:
    """Files of one network in the cache, each written whole; the one with the details last."""

    def __init__(self, context: Context, name: str, kind: str, data: Images, settings: Mapping[str, Any]):
        stamp = json.dumps([HIDDEN, settings, _fingerprint(data)], sort_keys=True)
        digest = hashlib.sha256(stamp.encode()).hexdigest()[:12]
        self._stem = context.cache / f"mlp-{name}-{kind}-{context.mode}-{context.seed}-{digest}"
        context.cache.mkdir(parents=True, exist_ok=True)

    def path(self, ending: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{ending}")

    @property
    def complete(self) -> bool:
        return self.path("json").is_file()

    def put(self, model: nn.Module, details: Mapping[str, Any], posterior: Posterior | None = None) -> None:
        _save(model.state_dict(), self.path("safetensors"))
        if posterior is not None:
            posterior.save(self.path("posterior.safetensors"))
        write(self.path("json"), json.dumps(details, indent=1) + "\n")

    def trained(self, data: Images) -> Trained:
        model = _network(data)
        model.load_state_dict(load_file(self.path("safetensors")))
        return Trained(model.eval(), data, json.loads(self.path("json").read_text(encoding="utf-8")))


def _fingerprint(data: Images) -> list[Any]:
    """Tells files of the same name apart."""
    x, y = data.train
    return [list(x.shape), data.classes, int((y * torch.arange(len(y))).sum()), round(x[:, ::7].double().sum().item())]


def _save(weights: dict[str, Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: w.detach().contiguous() for name, w in weights.items()}, temporary)
        os.chmod(temporary, 0o644)  # safetensors makes files private
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
