"""How calibration depends on how long the network was trained, which the paper does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.datasets import batches
from experiments.frame.experiment import Context, Record, Unit
from experiments.methods import mlp
from experiments.methods.classify import plain, score
from experiments.mnist.networks import MAP, laplace, map_network

SUFFIX = "-training"
EPOCHS = (5, 10, 20, MAP["epochs"])


def unit(name: str) -> Unit:
    return Unit(name + SUFFIX, {"map": MAP, "epochs": list(EPOCHS)}, lambda context: measure(context, name, EPOCHS))


def measure(context: Context, name: str, epochs: Sequence[int]) -> Record:
    """NLPD and ECE of MAP, of temperature scaling and of ours (probit, full covariance), by epochs of training."""
    found = []
    for count in epochs:
        trained, posterior = map_network(context, name, count), laplace(context, name, "kronecker", count)
        validation, (x, y) = batches(trained.data.validation), trained.data.test
        ours, _ = mlp.ours(trained.model, posterior, "LA", validation, ("probit",), covariance="full")
        for predictor in (*plain(trained.model, validation), ours):
            scored = score(predictor.label, predictor(x.split(500)), y)
            entry: dict[str, Any] = {"epochs": count, "method": predictor.label.method, "scale": predictor.label.scale}
            found.append(entry | {"nlpd": scored.nlpd, "ece": scored.ece, "accuracy": scored.accuracy})
    return {"set": name, "rows": found}


def reading(title: str, record: Mapping[str, Any], limit: float) -> str:
    told = []
    for epochs in dict.fromkeys(row["epochs"] for row in record["rows"]):
        by = {row["method"]: row for row in record["rows"] if row["epochs"] == epochs}
        told.append(
            f"{epochs} epochs: MAP {by['MAP']['nlpd']:.3f} / {by['MAP']['ece']:.3f}, temperature scaling "
            f"{by['temperature scaling']['nlpd']:.3f} / {by['temperature scaling']['ece']:.3f}, ours "
            f"{by['ours']['nlpd']:.3f} / {by['ours']['ece']:.4f}"
        )
    within = [str(r["epochs"]) for r in record["rows"] if r["method"] == "ours" and r["ece"] <= limit]
    return (
        f"{title}, NLPD / ECE by length of training (the paper states none): {'; '.join(told)}. The ECE of ours is at "
        f"most {limit} for {'networks of ' + ', '.join(within) + ' epochs' if within else 'none of them'}."
    )
