"""What the comparisons share: a result, sampling whose scale can be fitted, and which results are the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from propagauss.demo.timing import Ratio
from propagauss.posteriors import Posterior
from propagauss.predictive.calibration import minimise

Structure = Literal["diagonal", "kronecker", "full"]
STRUCTURES: tuple[Structure, ...] = ("diagonal", "kronecker", "full")
OURS = "streamlined"
EXACT = "linearised"


@dataclass
class Result:
    """How one way of predicting did on the test part."""

    method: str
    posterior: str = ""
    link: str = ""
    scale: float | None = None
    fitted: bool = False  # whether scale (and noise) come from the validation part
    noise: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validation: float = math.inf  # NLPD on the validation part: what variants of a method are chosen by
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))  # -log p(y) of each test point
    probs: Tensor = field(default_factory=lambda: torch.zeros(0))  # [N, C], classification only
    predict: Callable[[Tensor], Any] | None = None  # the call that is timed
    time: Ratio | None = None

    @property
    def nlpd(self) -> float:
        return self.metrics["nlpd"]

    @property
    def structure(self) -> str:
        """The posterior in words."""
        return "Kronecker" if self.posterior == "kronecker" else self.posterior

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.method, self.structure, self.link.replace("_", "-")) if part)

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "method": self.method,
            "posterior": self.posterior or None,
            "link": self.link or None,
            "scale": self.scale,
            "fitted": self.fitted,
            "noise": self.noise,
            "validation_nlpd": self.validation,
            "metrics": self.metrics,
        }
        return row | ({"time": vars(self.time)} if self.time else {})


def best(results: Sequence[Result]) -> Result:
    """The result of least NLPD on the test part: to say which it is, never to choose one."""
    return min(results, key=lambda r: r.nlpd)


def chosen(results: Sequence[Result]) -> Result:
    """The result of least NLPD on the validation part, whatever the test part says."""
    return min(results, key=lambda r: r.validation)


def is_tied(one: Result, other: Result) -> bool:
    """Whether the NLPDs differ by less than two standard errors of the paired difference over the test points."""
    difference = (one.losses - other.losses).double()
    return abs(difference.mean().item()) <= 2 * difference.std().item() / math.sqrt(len(difference))


class Sampler:
    """`f(x, w + √scale ε_s)`, `ε_s ~ posterior`: `baselines.MonteCarlo` with the draws kept.

    So that a scale can be searched with common random numbers, and that timing does not count the drawing.
    """

    def __init__(self, model: nn.Module, posterior: Posterior, samples: int, seed: int):
        self.model, self.samples, self.scale = model, samples, 1.0
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        generator = torch.Generator().manual_seed(seed)
        self._deviations = posterior.bind(parameters).sample(samples, generator)
        self._means = {name: parameters[name] for name in self._deviations}
        self._weights = self._at(self.scale)

    def rescaled(self, scale: float) -> Sampler:
        """The same draws from the posterior with its covariance multiplied by `scale`."""
        new = object.__new__(type(self))
        new.__dict__ |= self.__dict__ | {"scale": scale}
        new._weights = new._at(scale)
        return new

    def latents(self, x: Tensor) -> Tensor:
        """`[samples, batch, ...]`"""
        return vmap(lambda weights: functional_call(self.model, weights, (x,)))(self._weights)

    def log_probs(self, x: Tensor) -> Tensor:
        return self.latents(x).log_softmax(-1).logsumexp(0) - math.log(self.samples)

    def log_density(self, x: Tensor, y: Tensor, noise: float) -> Tensor:
        """`log 1/S Σ_s N(y; f_s(x), noise²)`, at each point and output."""
        return mixture_log_density(self.latents(x), y, noise)

    def _at(self, scale: float) -> dict[str, Tensor]:
        return {n: torch.add(m, self._deviations[n], alpha=math.sqrt(scale)) for n, m in self._means.items()}


def mixture_log_density(latents: Tensor, y: Tensor, noise: float) -> Tensor:
    log_density = -0.5 * ((y - latents) / noise).square() - math.log(noise) - 0.5 * math.log(2 * math.pi)
    return log_density.logsumexp(0) - math.log(len(latents))


def fit_class_sampler(sampler: Sampler, x: Tensor, y: Tensor) -> Sampler:
    """With the scale of least NLPD on `(x, y)`."""

    def nlpd(scale: float) -> float:
        return -sampler.rescaled(scale).log_probs(x).gather(1, y[:, None]).double().mean().item()

    return sampler.rescaled(minimise(nlpd, 1.0))


def fit_regression_sampler(sampler: Sampler, x: Tensor, y: Tensor, noise: float) -> tuple[Sampler, float]:
    """With the scale and the noise of least NLPD on `(x, y)`; `noise` is where the search for it starts."""

    def best_noise(scale: float) -> tuple[float, float]:
        latents = sampler.rescaled(scale).latents(x).double()

        def nlpd(stddev: float) -> float:
            return -mixture_log_density(latents, y.double(), stddev).mean().item()

        found = minimise(nlpd, noise, (1e-2, 1e2))
        return nlpd(found), found

    scale = minimise(lambda scale: best_noise(scale)[0], 1.0)
    return sampler.rescaled(scale), best_noise(scale)[1]
