"""Ways to predict with one network: posteriors, engines, links and calibrations, all from cached latents.

A calibration is a scale of the latent covariance and a likelihood with its temperature, from validation images only:

    as it is       scale 1, temperature 1
    scale          the scale of least NLPD (the paper's; `fit_scale`)
    temperature    scale 1, the temperature of least NLPD, however small
    calibrate      both, by `calibrate` with its default tolerance
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.datasets import Pair, batches
from experiments.frame.experiment import Context
from experiments.methods.classify import Label, score
from experiments.valla.networks import POSTERIORS, Trained, laplace
from experiments.valla.ways import MAIN, ML, Way
from propagauss import tasks
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.likelihoods.information import information
from propagauss.metrics import predictive_entropy
from propagauss.posteriors import Posterior
from propagauss.posteriors.precision import with_prior_precision
from propagauss.predictive.calibration import (
    TOLERANCE,
    HeldOut,
    Trials,
    calibrated,
    held_out,
    latents,
    minimise,
    paired,
)

PRIORS = {"full": [10 ** (k / 2) for k in range(-2, 6)], "quick": [1.0, 10.0]}  # times that of the marginal likelihood
SIZE = 1000  # images in a batch
SAMPLES = 64  # of the logits, for the mutual information

Latents = list[tuple[Gaussian, Tensor]]
Fitted = tuple[float, CategoricalLikelihood]  # scale and likelihood


# -- posteriors and networks


def posteriors(
    context: Context, name: str, seed: int, given: Trained, factors: Sequence[float]
) -> Iterator[tuple[str, str, Posterior]]:
    """Kind, how the prior precision was chosen, and the posterior."""
    for kind in POSTERIORS:
        posterior = laplace(context, name, seed, kind, given)
        yield kind, ML, posterior
        if kind == "kronecker":
            yield kind, "validation", best_prior(given, posterior, factors)


def best_prior(given: Trained, posterior: Posterior, factors: Sequence[float]) -> Posterior:
    """The prior precision of least validation NLPD: linearised, probit link, nothing else fitted."""
    tried, likelihood = [], CategoricalLikelihood("probit")
    for factor in factors:
        changed = with_prior_precision(posterior, factor * posterior.details["prior_precision"])
        held = held_out(latents_of("linearised", given, changed, given.data.validation), likelihood)
        tried.append((Trials(held, likelihood).as_given(1.0), changed))
    return min(tried, key=lambda each: each[0])[1]


def network(engine: str, given: Trained, posterior: Posterior | None) -> Any:
    make = linearise if engine == "linearised" else streamline
    return make(given.model, posterior, given.data.validation[0][:2])


def latents_of(engine: str, given: Trained, posterior: Posterior | None, pair: Pair) -> Latents:
    return list(latents(network(engine, given, posterior), batches(pair, SIZE), False))


# -- calibrations


def calibrations(found: Latents, link: str) -> dict[str, Fitted]:
    """Each of `ways.CALIBRATIONS`, from the latents of the validation images."""
    likelihood = CategoricalLikelihood(link)
    held: HeldOut = held_out(found, likelihood)
    trials = Trials(held, likelihood)
    report, fitted = calibrated(held, likelihood, 1.0, TOLERANCE)
    free = Trials(held, likelihood, bounded=False)
    tempered: Any = free.likelihood_of(free.at(1.0))
    return {
        "as it is": (1.0, likelihood),
        "scale": (minimise(trials.as_given, 1.0), likelihood),
        "temperature": (1.0, tempered),
        "calibrate": (report.after, fitted),
    }


# -- how well they did


@dataclass(frozen=True)
class Measured:
    """What is stored of a row, and the loss of each test image, which is not."""

    numbers: dict[str, Any]
    losses: Tensor


def measure(way: Way, fitted: Fitted, test: Latents, outliers: Latents) -> Measured:
    """Metrics on test images; `entropy`, `variance` and `information` are AUROCs against the outliers."""
    scale, likelihood = fitted
    inside, outside = (log_probs(fitted, part) for part in (test, outliers))
    y = torch.cat([labels for _, labels in test])
    scored = score(Label(way.engine), inside, y)
    numbers = vars(way) | {"scale": scale, "temperature": float(likelihood.temperature)}
    numbers |= {key: getattr(scored, key) for key in ("accuracy", "nlpd", "nlpd_error", "ece")}
    numbers["entropy"] = auroc(*(predictive_entropy(each.exp()) for each in (inside, outside)))
    if way.engine:
        numbers["variance"] = auroc(*(torch.cat([g.variance.mean(-1) for g, _ in part]) for part in (test, outliers)))
        if way in MAIN:
            numbers["information"] = auroc(*(mutual_information(fitted, part) for part in (test, outliers)))
    return Measured(numbers, scored.losses)


def log_probs(fitted: Fitted, found: Latents) -> Tensor:
    scale, likelihood = fitted
    return torch.cat([likelihood.log_probs(g.scale(scale)).double() for g, _ in found])


def mutual_information(fitted: Fitted, found: Latents) -> Tensor:
    scale, likelihood = fitted
    temperature = float(likelihood.temperature)
    return torch.cat([information(g.scale(scale), samples=SAMPLES, temperature=temperature) for g, _ in found])


def auroc(inside: Tensor, outside: Tensor) -> float:
    return tasks.ood.evaluate(inside.double(), outside.double()).auroc


def against(rows: Sequence[Measured], base: Measured) -> list[dict[str, Any]]:
    """Numbers to store: with the difference in NLPD to `base`, paired over test images, and its standard error."""
    return [row.numbers | {"against": list(paired(row.losses, base.losses))} for row in rows]
