"""A text network for the comparison of calibrations: MiniLM on MRPC, with sentence pairs of WiC as outliers.

The MLP of the last block and the head are trained, and random. Outliers are put into the same prompt, so that only what
the sentences say, and how long they are, tells them apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets import available, text
from experiments.frame.experiment import Context
from experiments.transformers.gpt import SHARED, fine_tune
from experiments.transformers.gpt_features import TESTED_ON, Features, compute, rows
from experiments.transformers.gpt_networks import BACKBONES, Parts
from propagauss.gaussian import Gaussian
from propagauss.posteriors import Posterior, fit_laplace

BACKBONE, TASK, OUTSIDE = "minilm", "mrpc", "wic"
FULL: dict[str, Any] = {key: SHARED[key] for key in ("tokens", "batch", "head_rate", "decay")}
FULL |= {"blocks": 1, "counts": [1600, 1000, 1000], "outliers": 400, "epochs": 3, "rate": 1e-4}
QUICK = FULL | {"counts": [24, 24, 16], "outliers": 8, "epochs": 1, "tokens": 32}


def settings(context: Context) -> dict[str, Any]:
    return QUICK if context.quick else FULL


def present(context: Context) -> bool:
    """Whether the model and the data are here."""
    files = [(TASK, "train"), (TASK, TESTED_ON[TASK]), (OUTSIDE, TESTED_ON[OUTSIDE])]
    return BACKBONES[BACKBONE].find() is not None and all(
        available(context, "text", task, f"{part}.jsonl") for task, part in files
    )


def network(context: Context) -> tuple[nn.Module, Posterior, list[Features]]:
    """The trained part of the network, a posterior over it, and validation, test and outliers as they enter it."""
    how = settings(context)
    parts = replace(BACKBONES[BACKBONE], blocks=how["blocks"]).load()
    outside = text(context, OUTSIDE, TESTED_ON[OUTSIDE])[: how["outliers"]]
    chosen = [*rows(context, TASK, how["counts"]), outside]
    train, *rest = (compute(parts, TASK, some, how["tokens"], TASK) for some in chosen)
    model = _trained(context, parts, train, how)
    names = [*parts.mlps, "head.*"]
    return model, fit_laplace(model, train.batches(), structure="kronecker", parameters=names), rest


def _trained(context: Context, parts: Parts, train: Features, how: Mapping[str, Any]) -> nn.Module:
    suffix = copy.deepcopy(parts.suffix)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(context.seed)
        fine_tune(suffix, parts.mlps, train, how)
    return suffix.requires_grad_(True).eval()


class ByLength:
    """A network for each length of sequences, made when it is first met: `linearise` fixes the length."""

    def __init__(self, make: Callable[[Tensor], Callable[[Tensor], Gaussian]]):
        self._make = make
        self._nets: dict[int, Callable[[Tensor], Gaussian]] = {}

    def __call__(self, x: Tensor) -> Gaussian:
        if x.shape[1] not in self._nets:
            self._nets[x.shape[1]] = self._make(x[:2])
        return self._nets[x.shape[1]](x)
