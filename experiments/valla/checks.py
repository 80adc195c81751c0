"""What a prediction costs, and whether the linearised predictive is that of laplace-torch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from experiments.datasets import batches
from experiments.frame.experiment import Context, Record
from experiments.methods.classify import Link
from experiments.valla.methods import network
from experiments.valla.networks import POSTERIORS, laplace, trained
from propagauss.demo.timing import relative_times
from propagauss.engines.linearise import linearise
from propagauss.likelihoods.links import probit
from propagauss.posteriors import fit_laplace, from_laplace
from propagauss.predictive.classifier import Classifier

COST: dict[str, dict[str, Any]] = {
    "full": {"batches": [1, 100, 1000], "rounds": 25},
    "quick": {"batches": [1, 20], "rounds": 3},
}
LAPLACE: dict[str, dict[str, Any]] = {  # training images, test images, and how many of these at once
    "full": {"train": 5000, "points": 200, "batch": 10},
    "quick": {"train": 200, "points": 10, "batch": 10},
}
PAIRS: tuple[tuple[str, Link], ...] = (
    ("streamlined", "probit"),
    ("linearised", "probit"),
    ("linearised", "mean_field"),
)
NAME = "mnist"  # the first network of this set


@torch.no_grad()
def cost(context: Context) -> Record:
    """Seconds of a prediction, link included, over those of the plain forward pass with its softmax."""
    given, how, found = trained(context, NAME, context.seed), COST[context.mode], {}
    predictors = {}
    for kind in POSTERIORS:
        posterior = laplace(context, NAME, context.seed, kind, given)
        for engine, link in PAIRS:
            predictors[f"{kind}, {engine}, {link}"] = Classifier(network(engine, given, posterior), link)
    threads = torch.get_num_threads()
    for size in how["batches"]:
        x = given.data.test[0][:size]
        calls: dict[str, Any] = {name: lambda p=p, x=x: p(x).probs for name, p in predictors.items()}
        calls["plain"] = lambda x=x: given.model(x).softmax(-1)
        clock = time.process_time if threads == 1 else time.perf_counter
        ratios, seconds = relative_times(calls, "plain", how["rounds"], context.seed, clock=clock)
        found[str(size)] = {"plain_seconds": seconds} | {name: vars(ratio) for name, ratio in ratios.items()}
    return {"batches": found, "threads": threads}


def laplace_torch(context: Context) -> Record:
    """Kronecker, all parameters: the variances of laplace-torch, of its posterior linearised here, and of our own."""
    from laplace import Laplace

    given, how = trained(context, NAME, context.seed), LAPLACE[context.mode]
    some = [part[: how["train"]] for part in given.data.train]
    own = fit_laplace(given.model, batches((some[0], some[1])), structure="kronecker", progress=False)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*some), 500)
    theirs: Any = Laplace(given.model, "classification", "all", "kron", prior_precision=own.details["prior_precision"])
    start = time.perf_counter()
    theirs.fit(loader)
    fitted = time.perf_counter() - start
    x, y = (part[: how["points"]] for part in given.data.test)
    start = time.perf_counter()
    pairs = [theirs._glm_predictive_distribution(part) for part in x.split(how["batch"])]
    mean, covariance = (torch.cat([pair[i].detach() for pair in pairs]) for i in range(2))
    predicted = time.perf_counter() - start
    example = x[:2]
    with torch.no_grad():
        taken = linearise(given.model, from_laplace(theirs), example)(x).covariance
        ours = linearise(given.model, own, example)(x)
    nlpd = {
        "laplace-torch": _nlpd(mean, covariance, y),
        "ours": _nlpd(ours.mean, ours.covariance, y),
    }
    return {
        "train": len(some[1]),
        "points": len(y),
        "prior_precision": own.details["prior_precision"],
        "their_choice": _their_precision(theirs),
        "same_posterior": _deviation(taken, covariance),
        "own_fit": _deviation(ours.covariance, covariance),
        "nlpd": nlpd,
        "seconds": {"fit": fitted, "predict": predicted},
    }


def _deviation(found: Tensor, expected: Tensor) -> float:
    """The largest over inputs of the relative Frobenius norm of the difference."""
    gap = (found.double() - expected.double()).flatten(1).norm(dim=1)
    return (gap / expected.double().flatten(1).norm(dim=1)).max().item()


def _nlpd(mean: Tensor, covariance: Tensor, y: Tensor) -> float:
    found = probit(mean.double(), covariance.diagonal(dim1=1, dim2=2).double())
    return -found.gather(1, y[:, None]).mean().item()


def _their_precision(theirs: Any) -> float:
    """What laplace-torch chooses by marginal likelihood."""
    theirs.optimize_prior_precision(method="marglik")
    return float(theirs.prior_precision)
