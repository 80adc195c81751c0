"""What `linearise` gives for the networks and test points of `mc-samples`: no draws, so these units are quick.

The NLPD of the streamlined network is kept as well: it tells whether the network is the one of the curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from experiments.cost.mc_curves import TEST, some
from experiments.datasets import Pair, batches
from experiments.frame.experiment import Context, Unit
from experiments.methods.classify import Label, score
from propagauss import metrics
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.posteriors import Posterior
from propagauss.predictive.classifier import Classifier
from propagauss.predictive.regressor import Regressor

PREFIX = "linearised-"


def units(keys: Sequence[str]) -> list[Unit]:
    """One beside each of these: `uci-SET`, `IMAGES-KIND` or `vit-KIND`."""
    return [Unit(PREFIX + key, {"test": TEST}, partial(_run, key)) for key in keys]


def _run(key: str, context: Context) -> dict[str, Any]:
    if key.startswith("uci-"):
        return _uci(key.removeprefix("uci-"), context)
    name, _, kind = key.rpartition("-")
    return _vit(kind, context) if name == "vit" else _images(name, kind, context)


@torch.no_grad()
def _uci(name: str, context: Context) -> dict[str, Any]:
    from experiments.uci import uci
    from experiments.uci.posteriors import Fitted, laplace, mean_field

    parts, sizes, settings = uci.prepare(name, 0, context)
    x, y = some(parts.test, TEST["uci"])

    def one(fitted: Fitted) -> dict[str, float]:
        net = linearise(fitted.model, fitted.posterior, x[:2])
        predict = Regressor(net, fitted.noise).fit_scale(parts.validation_loader, progress=False)
        found = predict(x)
        ours = streamline(fitted.model, fitted.posterior, x[:2], covariance="full")
        beside = Regressor(ours, fitted.noise).fit_scale(parts.validation_loader, progress=False)
        numbers = {"nlpd": metrics.nlpd(found, y), "second": metrics.rmse(found, y), "scale": predict.scale}
        return numbers | {"ours": metrics.nlpd(beside(x), y)}

    with torch.enable_grad():
        fits = {
            "LA": laplace(parts, sizes, settings["map_steps"], context.seed),
            "MFVI": mean_field(parts, sizes, settings["ivon_steps"], context.seed),
        }
    return {"family": "uci", "name": name, "linearised": {kind: one(fitted) for kind, fitted in fits.items()}}


def _images(name: str, kind: str, context: Context) -> dict[str, Any]:
    from experiments.mnist import networks

    if kind == "LA":
        trained, posterior = networks.map_network(context, name), networks.laplace(context, name, "kronecker")
    else:
        trained, posterior = networks.ivon_network(context, name)
    held, test = some(trained.data.validation, 5000), some(trained.data.test, TEST["images"])
    structure = "full" if kind == "LA" else "diagonal"
    found = _classes(trained.model, posterior, batches(held), test, structure)
    return {"family": "images", "name": name, "linearised": {kind: found}}


def _vit(kind: str, context: Context) -> dict[str, Any]:
    from experiments.transformers import vit_networks

    model, posterior = vit_networks.tuned(context, "cifar10", "attention", kind)  # type: ignore[arg-type]
    tokens = vit_networks.tokens(context, "cifar10")
    found = _classes(model, posterior, batches(tokens.validation, 250), some(tokens.test, TEST["vit"]))
    return {"family": "vit", "name": "cifar10", "linearised": {kind: found}}


@torch.no_grad()
def _classes(
    model: nn.Module,
    posterior: Posterior,
    held: list[Pair],
    test: Pair,
    structure: Literal["diagonal", "full"] = "diagonal",
) -> dict[str, float]:
    nets = linearise(model, posterior, test[0][:2]), streamline(model, posterior, test[0][:2], covariance=structure)
    predictors = [Classifier(net).fit_scale(held, progress=False) for net in nets]
    found, ours = (
        score(Label(""), torch.cat([p.log_probs(x) for x, _ in batches(test, 250)]), test[1]) for p in predictors
    )
    return {"nlpd": found.nlpd, "second": found.accuracy, "scale": predictors[0].scale, "ours": ours.nlpd}
