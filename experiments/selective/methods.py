"""Predictions of all methods for one subject, with what each knows about its own uncertainty."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from experiments.methods.classify import Batches
from experiments.methods.draws import best_scale
from experiments.selective.factors import with_factors, with_second_moments
from experiments.selective.networks import Subject
from propagauss.demo.timing import relative_times
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.posteriors import Posterior
from propagauss.predictive.baselines import TemperatureScaling
from propagauss.predictive.calibration import TOLERANCE, calibrated, held_out, latents

LINK = "mean_field"  # for every Gaussian, so that engines are compared and not links
PLAIN, TEMPERATURE, ENSEMBLE = "plain model", "temperature scaling", "deep ensemble of 5"
MEAN, SAMPLES = "mean weights", "100 samples"
STREAMLINED, JOINT, LINEARISED = "streamlined", "streamlined, full covariance", "linearised"
FACTORS, MOMENTS = "streamlined, a factor per layer", "streamlined, expected second moments"
FIT_DRAWS, FIT_POINTS = 20, 500  # behind the scale of sampling
AS_IT_IS, FITTED = "as it is", "calibrated"


@dataclass(frozen=True)
class Prediction:
    """Of all test inputs; `form` says whether numbers were fitted on validation data, `numbers` which."""

    method: str
    posterior: str
    form: str
    log_probs: Tensor  # [N, C]
    epistemic: Tensor | None  # [N], mutual information of class and weights
    numbers: dict[str, Any]

    @property
    def name(self) -> str:
        return ", ".join(p for p in (self.posterior, self.method, self.form) if p)


@torch.no_grad()
def predictions(given: Subject, samples: int, seed: int, joint: bool) -> Iterator[Prediction]:
    """`joint`: whether the network is small enough for the covariance of all activations of a layer."""
    inputs = [x for x, _ in given.test]
    yield from _plain(given.members[0], PLAIN, "", given)
    members = torch.stack([_logits(member, inputs) for member in given.members])
    yield Prediction(ENSEMBLE, "", "", *mixed(members), {})
    for kind, (model, posterior) in given.fitted.items():
        if model is not given.members[0]:
            yield from _plain(model, MEAN, kind, given)
        yield from _sampled(model, posterior, kind, given, samples, seed)
        for method, make in engines(model, posterior, given.validation, joint).items():
            yield from _gaussian(make(), method, kind, given)


def engines(model: nn.Module, posterior: Posterior, validation: Batches, joint: bool) -> dict[str, Callable[[], Any]]:
    example = validation[0][0][:2]
    found: dict[str, Callable[[], Any]] = {STREAMLINED: lambda: streamline(model, posterior, example)}
    if joint:
        found[JOINT] = lambda: streamline(model, posterior, example, covariance="full")
    found[FACTORS] = lambda: streamline(model, with_factors(model, posterior, validation), example)
    if any(isinstance(module, nn.LayerNorm) for module in model.modules()):
        found[MOMENTS] = lambda: streamline(with_second_moments(model), posterior, example)
    found[LINEARISED] = lambda: linearise(model, posterior, example)
    return found


# -- one network


def _plain(model: nn.Module, method: str, kind: str, given: Subject) -> Iterator[Prediction]:
    temperature = TemperatureScaling(model).fit(given.validation, progress=False).temperature
    logits = _logits(model, [x for x, _ in given.test])
    yield Prediction(method, kind, "", logits.log_softmax(-1), None, {})
    scaled = (logits / temperature).log_softmax(-1)
    yield Prediction(TEMPERATURE, kind, "", scaled, None, {"temperature": temperature})


def _logits(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([model(x) for x in inputs]).double()


# -- Gaussians


def _gaussian(net: Any, method: str, kind: str, given: Subject) -> Iterator[Prediction]:
    """As it is, and calibrated; the latents are computed once."""
    found = {part: list(latents(net, data, False)) for part, data in vars(given).items() if part in _PARTS}
    likelihood = CategoricalLikelihood(LINK)
    yield _read(found["test"], method, kind, AS_IT_IS, likelihood, 1.0)
    report, fitted = calibrated(held_out(found["validation"], likelihood), likelihood, 1.0, TOLERANCE)
    yield _read(found["test"], method, kind, FITTED, fitted, report.after)


_PARTS = ("validation", "test")


def _read(
    found: Sequence[tuple[Gaussian, Tensor]],
    method: str,
    kind: str,
    form: str,
    likelihood: CategoricalLikelihood,
    scale: float,
) -> Prediction:
    scaled = [latent.scale(scale) for latent, _ in found]
    log_probs = torch.cat([likelihood.log_probs(latent) for latent in scaled]).double()
    epistemic = torch.cat([likelihood.decompose(latent).epistemic for latent in scaled]).double()
    numbers = {"scale": scale, "temperature": float(likelihood.temperature)}
    return Prediction(method, kind, form, log_probs, epistemic, numbers)


# -- several networks


def mixed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the mean probabilities of networks `[S, N, C]`, and the mutual information of class and network."""
    each = logits.log_softmax(-1)
    mean = each.logsumexp(0) - math.log(len(each))
    return mean, _entropy(mean) - _entropy(each).mean(0)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def _sampled(
    model: nn.Module, posterior: Posterior, kind: str, given: Subject, samples: int, seed: int
) -> Iterator[Prediction]:
    """From the posterior as it is, and with the scale of least NLPD on some validation inputs."""
    some = _some(given.validation, FIT_POINTS)
    labels, few = torch.cat([y for _, y in some]), min(samples, FIT_DRAWS)

    def nlpd(scale: float) -> float:
        log_probs, _ = mixed(drawn(model, posterior, [x for x, _ in some], few, seed, scale))
        return -log_probs.gather(1, labels[:, None]).mean().item()

    inputs = [x for x, _ in given.test]
    for form, scale in ((AS_IT_IS, 1.0), (FITTED, best_scale(nlpd))):
        logits = drawn(model, posterior, inputs, samples, seed, scale)
        yield Prediction(SAMPLES, kind, form, *mixed(logits), {"scale": scale})


def drawn(
    model: nn.Module, posterior: Posterior, inputs: Sequence[Tensor], samples: int, seed: int, scale: float
) -> Tensor:
    """Logits `[samples, N, C]`, one draw of the weights after the other."""
    means = {name: p.detach() for name, p in model.named_parameters()}
    bound, found = posterior.bind(means), []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(samples):
        moved = {n: means[n] + math.sqrt(scale) * d[0] for n, d in bound.sample(1, generator).items()}
        found.append(torch.cat([functional_call(model, moved, (x,)) for x in inputs]))
    return torch.stack(found).double()


def _some(data: Batches, points: int) -> list[tuple[Tensor, Tensor]]:
    """The first of each batch, about so many in all: texts are in order of their length."""
    share = points / sum(len(y) for _, y in data)
    return [(x[: (n := math.ceil(share * len(y)))], y[:n]) for x, y in data]


# -- cost


@torch.no_grad()
def costs(given: Subject, samples: int, joint: bool, rounds: int, seed: int) -> dict[str, float]:
    """Time of each method on one batch over that of a plain pass, by processor time: others may be at work."""
    model, posterior = given.fitted["LA"]
    x = given.test[0][0]
    calls: dict[str, Callable[[], Any]] = {PLAIN: lambda: model(x)}
    for method, make in engines(model, posterior, given.validation, joint).items():
        if method not in (FACTORS, MOMENTS):  # they cost what streamlining does
            calls[method] = _call(make(), x)
    calls[SAMPLES] = lambda: drawn(model, posterior, [x], 1, seed, 1.0)
    calls[ENSEMBLE] = lambda: [member(x) for member in given.members]
    ratios, _ = relative_times(calls, PLAIN, rounds, seed, clock=time.process_time)
    found = {method: ratio.median for method, ratio in ratios.items()}
    return found | {SAMPLES: samples * found[SAMPLES]}


def _call(net: Any, x: Tensor) -> Callable[[], Any]:
    return lambda: net(x)
