"""Ways to predict classes from one model and posterior, as functions of inputs; and how well they did.

A `Predictor` maps batches of inputs to log-probabilities, so that the same one serves the test set, its rotated copies
and outliers. What it has to fit (scale, temperature) was fitted on validation batches when it was made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from scipy.stats import ttest_rel
from torch import Tensor, nn

from propagauss import metrics
from propagauss.demo.methods import Sampler, fit_class_sampler
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.links import categorical
from propagauss.posteriors import Posterior
from propagauss.predictive.baselines import TemperatureScaling
from propagauss.predictive.classifier import Classifier

Link = Literal["probit", "mean_field", "monte_carlo", "bridge"]
Batches = Sequence[tuple[Tensor, Tensor]]
LINKS: tuple[Link, ...] = ("probit", "mean_field", "monte_carlo", "bridge")
SCALE_DRAWS, SCALE_POINTS = 100, 1000  # for the scale of sampling, which needs all draws at every trial


@dataclass(frozen=True)
class Label:
    """What a row of a table is about."""

    method: str  # "MAP", "temperature scaling", "sampling", "GLM" or "ours"
    posterior: str = ""  # such as "LA kronecker", "MFVI"
    link: str = ""
    form: str = ""  # of Kronecker factors: "exact" or "factored"
    scale: float | None = None
    fitted: bool = False

    @property
    def name(self) -> str:
        fitted = "scale fitted" if self.fitted and self.method in ("sampling", "GLM") else ""
        return " ".join(p for p in (self.posterior, self.method, self.link, self.form, fitted) if p)


@dataclass(frozen=True)
class Predictor:
    label: Label
    log_probs: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def __call__(self, inputs: Iterable[Tensor]) -> Tensor:
        """Log-probabilities `[N, C]` of all batches."""
        return torch.cat([self.log_probs(x) for x in inputs])


class Remembered:
    """Latents of each batch computed once, however many links and scales are tried on them."""

    def __init__(self, net: Callable[[Tensor], Gaussian]):
        self.net = net
        self._seen: dict[int, tuple[Tensor, Gaussian]] = {}

    def __call__(self, x: Tensor) -> Gaussian:
        if id(x) not in self._seen:
            self._seen[id(x)] = (x, self.net(x))  # the batch is kept, so that its id stays its own
        return self._seen[id(x)][1]


# -- the methods


def plain(model: nn.Module, validation: Batches) -> list[Predictor]:
    """The model itself, and with a temperature."""
    temperature = TemperatureScaling(model).fit(validation, progress=False).temperature
    return [
        Predictor(Label("MAP"), lambda x: model(x).log_softmax(-1)),
        Predictor(
            Label("temperature scaling", scale=temperature, fitted=True),
            lambda x: (model(x) / temperature).log_softmax(-1),
        ),
    ]


@torch.no_grad()
def sampling(
    model: nn.Module, posterior: Posterior, name: str, validation: Batches, samples: int, seed: int = 0
) -> list[Predictor]:
    """Averages over draws of the weights: from the posterior as it is, and with its scale fitted."""
    x, y = (torch.cat(part)[:SCALE_POINTS] for part in zip(*validation, strict=True))
    scale = fit_class_sampler(Sampler(model, posterior, min(samples, SCALE_DRAWS), seed), x, y).scale
    sampler = Sampler(model, posterior, samples, seed)
    return [
        Predictor(Label("sampling", name, scale=s.scale, fitted=s is not sampler), s.log_probs)
        for s in (sampler, sampler.rescaled(scale))
    ]


def glm(
    model: nn.Module, posterior: Posterior, name: str, validation: Batches, links: Sequence[Link] = ("probit",)
) -> list[Predictor]:
    """Linearised in the weights: as it is, and with its scale fitted."""
    net = linearise(model, posterior, validation[0][0][:2])
    return _gaussian(net, "GLM", name, "", validation, links, (False, True))


def ours(
    model: nn.Module,
    posterior: Posterior,
    name: str,
    validation: Batches,
    links: Sequence[Link] = LINKS,
    form: str = "",
    **options: Any,
) -> list[Predictor]:
    """One forward pass, its scale fitted (and, with the probit link, as it is)."""
    net = streamline(model, posterior, validation[0][0][:2], **options)
    fitted = _gaussian(net, "ours", name, form, validation, links, (True,))
    return fitted + _gaussian(net, "ours", name, form, validation, ("probit",), (False,))


def _gaussian(
    net: Any, method: str, name: str, form: str, validation: Batches, links: Sequence[Link], fits: Sequence[bool]
) -> list[Predictor]:
    latents, found = Remembered(net), []
    for link in links:
        for fitted in fits:
            classifier = Classifier(latents, link)
            if fitted:
                classifier.fit_scale(validation, progress=False)
            label = Label(method, name, link, form, classifier.scale, fitted)
            found.append(Predictor(label, classifier.log_probs))
    return found


# -- how well they did


@dataclass
class Score:
    """Metrics of one predictor on one set; `losses` (-log p of each point) and `probs` are not stored."""

    label: Label
    accuracy: float
    accuracy_error: float
    nlpd: float
    nlpd_error: float
    ece: float
    losses: Tensor
    hits: Tensor
    entropy: Tensor

    def as_dict(self) -> dict[str, Any]:
        numbers = {k: getattr(self, k) for k in ("accuracy", "accuracy_error", "nlpd", "nlpd_error", "ece")}
        return asdict(self.label) | {"name": self.label.name} | numbers


def score(label: Label, log_probs: Tensor, y: Tensor) -> Score:
    """Errors are standard errors of the mean over the test points."""
    predictive = categorical(log_probs)
    losses, hits = -predictive.log_prob(y).double(), (log_probs.argmax(-1) == y).double()
    return Score(
        label,
        metrics.accuracy(predictive, y),
        _error(hits),
        metrics.nlpd(predictive, y),
        _error(losses),
        metrics.ece(predictive, y),
        losses,
        hits,
        predictive.entropy(),
    )


def _error(values: Tensor) -> float:
    return values.std().item() / math.sqrt(len(values))


def bold(values: Sequence[Tensor], larger: bool = False) -> list[bool]:
    """Which of several methods are the best, or not told apart from it by a paired t-test at 5%, as the paper bolds."""
    means = [v.mean().item() for v in values]
    best = means.index(max(means) if larger else min(means))
    return [i == best or not _differ(v, values[best]) for i, v in enumerate(values)]


def _differ(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return False
    return bool(ttest_rel(one.numpy(), other.numpy()).pvalue < 0.05)
