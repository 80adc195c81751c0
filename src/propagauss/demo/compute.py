"""What `propagauss demo` computes: small networks on bundled real data, and every way of predicting with them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from propagauss.demo import classification, data, opening, regression
from propagauss.demo.methods import STRUCTURES, Result, Structure
from propagauss.demo.regression import Band
from propagauss.demo.training import train, train_classifier
from propagauss.engines.streamline import Streamlined, streamline
from propagauss.posteriors import Posterior, fit_laplace
from propagauss.tracing.once import traced_once
from propagauss.version import __version__

PICTURE: tuple[Structure, ...] = ("diagonal", "kronecker")  # posteriors of the one-dimensional picture
STEPS = 2 * (2 + 4 * len(STRUCTURES)) + 3  # for each study, then timing and pictures
_Step = Callable[[str], None]
_Likelihood = Literal["classification", "regression"]


@dataclass(frozen=True)
class Settings:
    """What the demo does; `quick` makes everything small."""

    seed: int = 0
    quick: bool = False
    digits_hidden: tuple[int, ...] = (24, 16)  # small enough for a full covariance over all parameters
    diabetes_hidden: tuple[int, ...] = (16, 16)
    picture_hidden: tuple[int, ...] = (32,)
    digits_priors: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0)  # precisions, chosen from on validation data
    epochs: int = 60
    samples: int = 100
    opening_steps: int = 800
    timing_rounds: int = 15
    timing_batch: int = 64

    @classmethod
    def of(cls, seed: int, quick: bool) -> Settings:
        if not quick:
            return cls(seed)
        return cls(
            seed, True, (8, 8), (6, 6), (8,), epochs=15, samples=20, opening_steps=200, timing_rounds=2, timing_batch=8
        )


@dataclass(frozen=True)
class Study:
    """One data set: its network, the posteriors and how every method did."""

    split: data.Split
    sizes: tuple[int, ...]
    parameters: int
    posteriors: dict[str, Posterior]
    results: list[Result]
    plan: str
    priors: dict[float, float]  # validation NLPD for each prior precision that was tried


@dataclass(frozen=True)
class Demo:
    """All that the report shows."""

    settings: Settings
    opening: opening.Opening
    digits: Study
    diabetes: Study
    picture: data.Split
    grid: torch.Tensor
    bands: list[Band]
    map_seconds: float
    elapsed: float
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "versions": self.versions,
            "seconds": self.elapsed,
            "map_seconds_per_batch": self.map_seconds,
            "opening": {"noise": self.opening.noise, "inside": self.opening.inside, **self.opening.multiples},
            "digits": _study_dict(self.digits),
            "diabetes": _study_dict(self.diabetes),
        }


@traced_once()
def compute(settings: Settings, step: _Step) -> Demo:
    """Train, fit, compare; `step` is told what comes next."""
    start = time.perf_counter()
    step("first picture")
    first = opening.compute(settings.seed, settings.opening_steps)
    digits = _study(data.digits(settings.seed), settings.digits_hidden, "classification", settings, step)
    step("time per prediction")
    batch = digits.split.test[0][: settings.timing_batch]
    seconds = classification.add_times(digits.results, batch, settings.timing_rounds, settings.seed)
    diabetes = _study(data.diabetes(settings.seed), settings.diabetes_hidden, "regression", settings, step)
    step("picture")
    picture = data.body_mass(settings.seed)
    grid = torch.linspace(-4.5, 5.5, 201)[:, None]
    model, _ = _trained(picture, settings.picture_hidden, "regression", settings)
    posteriors, nets = _posteriors(model, PICTURE, "regression", picture, lambda what: None)
    bands = regression.bands(model, posteriors, nets, picture, grid, settings.samples, settings.seed)
    elapsed = time.perf_counter() - start
    return Demo(settings, first, digits, diabetes, picture, grid, bands, seconds, elapsed, _versions())


def _study(
    split: data.Split,
    hidden: tuple[int, ...],
    likelihood: _Likelihood,
    settings: Settings,
    step: _Step,
) -> Study:
    step(f"training, {likelihood}")
    model, priors = _trained(split, hidden, likelihood, settings)
    posteriors, nets = _posteriors(model, STRUCTURES, likelihood, split, step)
    compare = classification.compare if likelihood == "classification" else regression.compare
    results = compare(model, posteriors, nets, split, settings.samples, settings.seed, step)
    return Study(
        split,
        _sizes(split, hidden, likelihood),
        sum(p.numel() for p in model.parameters()),
        posteriors,
        results,
        str(nets["kronecker"].plan),
        priors,
    )


def _posteriors(
    model: nn.Module, structures: tuple[Structure, ...], likelihood: _Likelihood, split: data.Split, step: _Step
) -> tuple[dict[str, Posterior], dict[str, Streamlined]]:
    """Posteriors and streamlined networks, with joint covariances of the latents where the posterior has any."""
    posteriors: dict[str, Posterior] = {}
    nets: dict[str, Streamlined] = {}
    for name in structures:
        step(f"posterior, {name}")
        posteriors[name] = fit_laplace(model, split.train_loader, likelihood, name, progress=False)
        covariance = "diagonal" if name == "diagonal" else "full"
        nets[name] = streamline(model, posteriors[name], split.train[0][:2], covariance=covariance)
    return posteriors, nets


def _trained(
    split: data.Split, hidden: tuple[int, ...], likelihood: _Likelihood, settings: Settings
) -> tuple[nn.Module, dict[float, float]]:
    """The prior precision of a classifier is chosen on the validation part, that of a regression by evidence."""
    sizes = _sizes(split, hidden, likelihood)
    if likelihood == "classification":
        return train_classifier(split, sizes, settings.epochs, settings.seed, settings.digits_priors)
    return train(split, sizes, likelihood, settings.epochs, settings.seed), {}


def _sizes(split: data.Split, hidden: tuple[int, ...], likelihood: _Likelihood) -> tuple[int, ...]:
    x, y = split.train
    return (x.shape[1], *hidden, int(y.max()) + 1 if likelihood == "classification" else y.shape[1])


def _versions() -> dict[str, str]:
    return {"propagauss": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _study_dict(study: Study) -> dict[str, Any]:
    return {
        "sizes": study.sizes,
        "parameters": study.parameters,
        "points": study.split.sizes,
        "validation_nlpd_by_prior": {f"{prior:g}": nlpd for prior, nlpd in study.priors.items()},
        "posteriors": {name: posterior.details for name, posterior in study.posteriors.items()},
        "results": [result.as_dict() for result in study.results],
    }
