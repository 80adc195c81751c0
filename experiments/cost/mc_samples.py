"""How many draws sampling needs, beside one streamlined pass: UCI sets, image MLPs and a small ViT."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments import datasets
from experiments.cost import mc_linearised
from experiments.cost.mc_curves import TEST, Draws, Target, curve, some
from experiments.cost.mc_report import section
from experiments.datasets import DataMissing, Pair, batches
from experiments.frame.experiment import Context, Experiment, Unit
from experiments.methods.classify import Label, score
from propagauss import metrics
from propagauss.demo.timing import relative_times
from propagauss.engines.streamline import Streamlined, streamline
from propagauss.posteriors import Posterior
from propagauss.predictive.classifier import Classifier
from propagauss.predictive.regressor import Regressor

Kind = Literal["LA", "MFVI"]
KINDS: tuple[Kind, ...] = ("LA", "MFVI")
REGRESSION, CLASSES = (100, 500, 1000, 5000, 10_000, 50_000), (100, 500, 1000, 5000, 10_000, 25_000)
VIT, QUICK = tuple(range(10, 101, 10)), (10, 50)
# draws from a full covariance of P parameters cost P² each: these sets stop earlier
UCI_MOST = {"itt": 10_000, "pt": 10_000, "cac": 5000}
IMAGE_MOST = {"fashion_mnist": 25_000, "mnist": 5000}  # the paper's figure is about the first
TIMED_DRAWS, ROUNDS = 20, 11


def units(context: Context) -> list[Unit]:
    """One for each set, image set and posterior, and two for the ViT; those whose data are not there are left out."""
    from experiments.uci.data import SETS

    found = []
    for name in ("servo",) if context.quick else SETS:
        if datasets.available(context, "uci", f"{name}.csv"):
            found.append(_unit(f"uci-{name}", partial(_uci, name), _counts(context, REGRESSION, UCI_MOST.get(name))))
    for name in ("mnist",) if context.quick else IMAGE_MOST:
        if datasets.available(context, "images", f"{name}.npz"):
            counts = _counts(context, CLASSES, IMAGE_MOST[name])
            found += [_unit(f"{name}-{kind}", partial(_images, name, kind), counts) for kind in KINDS]
    if not context.quick and datasets.available(context, "images", "cifar10.npz"):
        found += [_unit(f"vit-{kind}", partial(_vit, kind), VIT) for kind in KINDS]
    if not found:
        raise DataMissing("uci/*.csv or images/mnist.npz is needed (docs/experiments.md)")
    return found + mc_linearised.units([unit.key for unit in found])


def _unit(key: str, run: Any, counts: Sequence[int]) -> Unit:
    return Unit(key, {"counts": list(counts), "test": TEST}, partial(run, counts))


def _counts(context: Context, counts: Sequence[int], most: int | None) -> tuple[int, ...]:
    if context.quick:
        return QUICK
    return tuple(c for c in counts if most is None or c <= most)


# -- the units


def _uci(name: str, counts: Sequence[int], context: Context) -> dict[str, Any]:
    """Both posteriors on the first fold of a set, trained as in the experiment `uci`."""
    from experiments.uci import uci
    from experiments.uci.posteriors import Fitted, laplace, mean_field

    parts, sizes, settings = uci.prepare(name, 0, context)
    test = some(parts.test, TEST["uci"])

    def one(fitted: Fitted) -> dict[str, Any]:
        net = streamline(fitted.model, fitted.posterior, test[0][:2], covariance="full")
        predict = Regressor(net, fitted.noise).fit_scale(parts.validation_loader, progress=False)
        with torch.no_grad():
            predictive = predict(test[0])
        numbers = {"nlpd": metrics.nlpd(predictive, test[1]), "second": metrics.rmse(predictive, test[1])}
        draws = Draws(fitted.model, fitted.posterior, context.seed)
        return _compared(draws, net, test, Target(test[1], fitted.noise), counts, numbers | {"scale": predict.scale})

    steps = settings["map_steps"], settings["ivon_steps"]
    found = {"LA": one(laplace(parts, sizes, steps[0], context.seed))}
    found["MFVI"] = one(mean_field(parts, sizes, steps[1], context.seed))
    return {"family": "uci", "name": name, "test": len(test[0]), "second": "rmse", "curves": found}


def _images(name: str, kind: Kind, counts: Sequence[int], context: Context) -> dict[str, Any]:
    """The MLP of the experiment `mnist`: LA with Kronecker factors, or MFVI."""
    from experiments.mnist import networks

    if kind == "LA":
        trained, posterior = networks.map_network(context, name), networks.laplace(context, name, "kronecker")
    else:
        trained, posterior = networks.ivon_network(context, name)
    test = some(trained.data.test, TEST["images"])
    validation = batches(some(trained.data.validation, 5000))
    structure = "full" if kind == "LA" else "diagonal"
    net = streamline(trained.model, posterior, test[0][:2], covariance=structure)
    found = _classes(trained.model, posterior, net, validation, test, counts, context.seed)
    return {"family": "images", "name": name, "test": len(test[0]), "second": "accuracy", "curves": {kind: found}}


def _vit(kind: Kind, counts: Sequence[int], context: Context) -> dict[str, Any]:
    """The ViT of the experiment `vit` on CIFAR-10, with random attention in its last two blocks."""
    from experiments.transformers import vit_networks

    model, posterior = vit_networks.tuned(context, "cifar10", "attention", kind)
    tokens = vit_networks.tokens(context, "cifar10")
    test = some(tokens.test, TEST["vit"])
    net = streamline(model, posterior, test[0][:2])
    found = _classes(model, posterior, net, batches(tokens.validation, 250), test, counts, context.seed, False)
    return {"family": "vit", "name": "cifar10", "test": len(test[0]), "second": "accuracy", "curves": {kind: found}}


# -- shared


def _classes(
    model: nn.Module,
    posterior: Posterior,
    net: Streamlined,
    validation: list[Pair],
    test: Pair,
    counts: Sequence[int],
    seed: int,
    vectorised: bool = True,
) -> dict[str, Any]:
    predict = Classifier(net).fit_scale(validation, progress=False)
    with torch.no_grad():
        log_probs = torch.cat([predict.log_probs(x) for x, _ in batches(test, 250)])
    found = score(Label("ours"), log_probs, test[1])
    numbers = {"nlpd": found.nlpd, "second": found.accuracy, "scale": predict.scale}
    return _compared(Draws(model, posterior, seed, vectorised), net, test, Target(test[1]), counts, numbers)


def _compared(
    draws: Draws, net: Streamlined, test: Pair, target: Target, counts: Sequence[int], ours: dict[str, float]
) -> dict[str, Any]:
    """The curve, what ours gives, and the cost of one draw in streamlined passes over the same inputs."""
    points = curve(draws, test[0], target, counts)
    return {"points": points, "ours": ours, "cost": _cost(draws, net, test[0][:250])}


@torch.no_grad()
def _cost(draws: Draws, net: Streamlined, x: Tensor) -> dict[str, float]:
    """Of one draw (drawing the weights and a pass over `x`), relative to one pass of the streamlined network."""
    n = TIMED_DRAWS
    calls = {"ours": lambda: net(x), "draws": lambda: next(draws.outputs(x, n, n))}
    ratio = relative_times(calls, "ours", ROUNDS)[0]["draws"]
    return {"median": ratio.median / n, "low": ratio.low / n, "high": ratio.high / n}


EXPERIMENT = Experiment(
    "mc-samples",
    "The number of samples",
    "fig:mc_regression, fig:mc_classification, fig:mc_vit",
    units,
    section,
    needs=("ivon", "transformers"),
)
