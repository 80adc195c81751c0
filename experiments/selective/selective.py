"""Selective prediction: risk and coverage of all methods when the least confident predictions are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.datasets import available, path
from experiments.frame.experiment import Context, Experiment, Record, Unit
from experiments.selective.methods import ENSEMBLE, PLAIN, TEMPERATURE, Prediction, costs, predictions
from experiments.selective.networks import config, subject
from experiments.selective.report import RISKS, SETS, section
from experiments.selective.texts import TASKS
from experiments.transformers.gpt_features import TESTED_ON
from experiments.transformers.gpt_networks import BACKBONES
from propagauss import metrics

SEEDS = {"fashion_mnist": 3, "pneumoniamnist": 3, "cifar10": 1, "mrpc": 1, "wic": 1}
SAMPLES, RESAMPLES, ROUNDS = {"full": 100, "quick": 5}, {"full": 200, "quick": 20}, {"full": 15, "quick": 1}
AGAINST = (PLAIN, TEMPERATURE, ENSEMBLE)  # with which the AURC of every method is compared


def units(context: Context) -> list[Unit]:
    """One for each set and seed; sets whose data or network are not there are left out, unless all are.

    A quick run has only the last of them.
    """
    names = [n for n in SETS if _there(context, n)]
    if not names:
        path(context, "images", "fashion_mnist.npz")
    names = names[-1:] if context.quick else names
    pairs = [(name, seed) for name in names for seed in range(1 if context.quick else SEEDS[name])]
    common = {"samples": SAMPLES[context.mode], "resamples": RESAMPLES[context.mode]}
    return [
        Unit(f"{name}-{seed}", common | {"seed": seed} | config(context, name), partial(run, name=name, seed=seed))
        for name, seed in pairs
    ]


def _there(context: Context, name: str) -> bool:
    if name not in TASKS:
        return available(context, "images", f"{name}.npz")
    parts = ("train", TESTED_ON[name])
    return BACKBONES["minilm"].find() is not None and all(
        available(context, "text", name, f"{part}.jsonl") for part in parts
    )


def run(context: Context, name: str, seed: int) -> Record:
    """`seed` is that of the network; with another seed for the whole run all of them move."""
    context = replace(context, seed=context.seed + seed)
    given, samples = subject(context, name), SAMPLES[context.mode]
    joint = name != "cifar10"  # the images between its layers are too large
    y = torch.cat([labels for _, labels in given.test])
    rows = measured(list(predictions(given, samples, context.seed, joint)), y, RESAMPLES[context.mode])
    cost = costs(given, samples, joint, ROUNDS[context.mode], context.seed)
    return {"set": name, "seed": seed, "test": len(y), "rows": rows, "costs": cost}


# -- how well they did


def measured(found: Sequence[Prediction], y: Tensor, resamples: int) -> list[dict[str, Any]]:
    """Metrics of each, and its AURC minus those of `AGAINST`, with errors from resampled test inputs."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(y), (resamples, len(y)), generator=generator)
    areas = {p.name: resampled(*confidence(p, y), chosen) for p in found}
    rows = []
    for p in found:
        certain, correct = confidence(p, y)
        row = {"name": p.name, "method": p.method, "posterior": p.posterior, "form": p.form, **p.numbers}
        row |= {"accuracy": correct.double().mean().item(), "ece": metrics.ece(p.log_probs.exp(), y)}
        row["nlpd"] = -p.log_probs.gather(1, y[:, None]).mean().item()
        row |= _selective(certain, correct) | {"aurc_error": areas[p.name].std().item()}
        row["against"] = {n: _gap(row["aurc"], areas[p.name], areas[n], found, n, y) for n in AGAINST}
        row["epistemic"] = None if p.epistemic is None else _selective(-p.epistemic, correct)
        rows.append(row)
    return rows


def confidence(p: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """`-log(1 - p)` of the largest probability, which sorts as `p` but does not round to ties; whether it is right."""
    top = p.log_probs.argmax(-1)
    rest = p.log_probs.scatter(1, top[:, None], -math.inf)
    return -rest.logsumexp(-1), top == y


def _selective(certain: Tensor, correct: Tensor) -> dict[str, Any]:
    coverage = [metrics.coverage_at_risk(certain, correct, risk) for risk in RISKS]
    return {"aurc": metrics.aurc(certain, correct), "coverage": coverage}


def _gap(aurc: float, mine: Tensor, theirs: Tensor, found: Sequence[Prediction], other: str, y: Tensor) -> list[float]:
    base = next(p for p in found if p.name == other)
    return [aurc - metrics.aurc(*confidence(base, y)), (mine - theirs).std().item()]


def resampled(certain: Tensor, correct: Tensor, chosen: Tensor) -> Tensor:
    """AURC of each resample: `[resamples]`."""
    order = certain[chosen].argsort(dim=1, descending=True, stable=True)
    wrong = (~correct)[chosen].gather(1, order).double()
    return (wrong.cumsum(1) / torch.arange(1, wrong.shape[1] + 1)).mean(1)


EXPERIMENT = Experiment(
    "selective",
    "Selective prediction",
    "Not in the paper; after the protocol of arXiv 2606.16214",
    units,
    section,
    needs=("ivon", "transformers"),
)
