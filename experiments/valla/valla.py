"""VaLLA's protocol: test NLL, ECE, outliers and rotated images for a tanh MLP, beside its published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from experiments.datasets import Pair, images, path
from experiments.frame.experiment import Context, Experiment, Record, Unit
from experiments.methods.classify import Label, score
from experiments.mnist.rotated import rotate
from experiments.published import valla as published
from experiments.valla import checks
from experiments.valla.methods import (
    PRIORS,
    SAMPLES,
    Fitted,
    Latents,
    against,
    calibrations,
    latents_of,
    log_probs,
    measure,
    posteriors,
)
from experiments.valla.networks import POSTERIORS, Trained, settings, trained
from experiments.valla.report import section
from experiments.valla.ways import CALIBRATIONS, ML, ROTATED, Way
from propagauss.predictive.calibration import TOLERANCE

SETS = ("mnist", "fashion_mnist")
OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
SEEDS = {"full": 5, "quick": 1}
ANGLES = {"full": list(range(0, 181, 10)), "quick": [0, 90]}
TURNED = 2000  # test images that are rotated
LINKS = {"streamlined": ("probit",), "linearised": ("probit", "mean_field")}


def units(context: Context) -> list[Unit]:
    for name in SETS:
        path(context, "images", f"{name}.npz")
    config = {
        "networks": settings(context),
        "posteriors": POSTERIORS,
        "priors": PRIORS[context.mode],
        "tolerance": TOLERANCE,
        "temperature": "free",  # at the posterior's own scale
    }
    config |= {
        "angles": ANGLES[context.mode],
        "turned": TURNED,
        "samples": SAMPLES,
        "links": LINKS,
        "rotated": [vars(w) for w in ROTATED],
    }
    found = [
        Unit(f"{name}-{k}", config, partial(run, name=name, number=k))
        for k in range(SEEDS[context.mode])
        for name in SETS
    ]
    cost = {"networks": settings(context), **checks.COST[context.mode]}
    check = {"networks": settings(context), **checks.LAPLACE[context.mode]}
    both = [Unit("cost", cost, checks.cost), Unit("laplace-torch", check, checks.laplace_torch)]
    return [*found[: len(SETS)], *both, *found[len(SETS) :]]  # a network of each set first


def run(context: Context, name: str, number: int) -> Record:
    """All ways to predict with one network."""
    seed = context.seed + number
    given = trained(context, name, seed)
    outside = images(context, OTHER[name]).flat().test[0][: len(given.data.test[1])]
    parts = {"validation": given.data.validation, "test": given.data.test}
    parts["outliers"] = (outside, torch.zeros(len(outside), dtype=torch.long))
    turned = _turned(given, ANGLES[context.mode]) if name == "mnist" else []
    rows, curves, precisions = [], {}, {}

    def add(way: Way, fitted: Fitted, found: Mapping[str, Latents], engine: str, posterior: Any) -> None:
        rows.append(measure(way, fitted, found["test"], found["outliers"]))
        if turned and way in ROTATED:
            curves[ROTATED.index(way)] = [
                _scores(fitted, latents_of(engine, given, posterior, pair)) for pair in turned
            ]

    plain = {part: latents_of("streamlined", given, None, pair) for part, pair in parts.items()}
    fits = calibrations(plain["validation"], "probit")
    add(Way(), fits["as it is"], plain, "streamlined", None)
    add(Way(calibration="temperature"), fits["temperature"], plain, "streamlined", None)
    for kind, prior, posterior in posteriors(context, name, seed, given, PRIORS[context.mode]):
        precisions[f"{kind}, {prior}"] = posterior.details["prior_precision"]
        for engine, links in LINKS.items():
            if engine == "streamlined" and (kind, prior) != ("kronecker", ML):
                continue
            found = {part: latents_of(engine, given, posterior, pair) for part, pair in parts.items()}
            for link in links:
                fits = calibrations(found["validation"], link)
                for calibration in CALIBRATIONS:
                    add(Way(kind, prior, engine, link, calibration), fits[calibration], found, engine, posterior)
    return {
        "set": name,
        "seed": seed,
        "rate": given.rate,
        "rates": given.tried,
        "precisions": precisions,
        "rows": against(rows, rows[1]),
        "angles": ANGLES[context.mode] if turned else [],
        "turned": len(turned[0][1]) if turned else 0,
        "curves": {str(index): curve for index, curve in curves.items()},
    }


def _turned(given: Trained, angles: Sequence[int]) -> list[Pair]:
    x, y = (part[:TURNED] for part in given.data.test)
    return [(rotate(x.reshape(-1, 1, 28, 28), angle).flatten(1), y) for angle in angles]


def _scores(fitted: Fitted, found: Latents) -> dict[str, float]:
    scored = score(Label(""), log_probs(fitted, found), torch.cat([y for _, y in found]))
    return {key: getattr(scored, key) for key in ("nlpd", "ece", "accuracy")}


EXPERIMENT = Experiment(
    "valla",
    "VaLLA's protocol: MNIST and Fashion-MNIST as each other's outliers",
    published.SOURCE,
    units,
    section,
    needs=("laplace",),
)
