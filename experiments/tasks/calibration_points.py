"""How many validation points `calibrate` needs: one network, calibrated on random parts of its validation images."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.datasets import images
from experiments.frame.experiment import Context, Record
from experiments.valla.methods import Fitted, Latents, auroc, latents_of, log_probs
from experiments.valla.networks import laplace, settings, trained
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.metrics import predictive_entropy
from propagauss.predictive.calibration import TOLERANCE, Trials, calibrated, held_out, paired

NAME, OTHER = "fashion_mnist", "mnist"
HOW: dict[str, dict[str, Any]] = {
    "full": {"points": [100, 300, 1000, 5000], "draws": 10},
    "quick": {"points": [30, 100], "draws": 2},
}
ENGINES = {"streamlined": "probit", "linearised": "mean_field"}  # and the link of each


def config(context: Context) -> dict[str, Any]:
    return {"networks": settings(context), "tolerance": TOLERANCE, **HOW[context.mode]}


def run(context: Context) -> Record:
    """For each number of points and each draw of them, the test NLPD and AUROC minus those of temperature scaling."""
    given = trained(context, NAME, context.seed)
    posterior = laplace(context, NAME, context.seed, "kronecker", given)
    outside = images(context, OTHER).flat().test[0][: len(given.data.test[1])]
    parts = {"validation": given.data.validation, "test": given.data.test}
    parts["outliers"] = (outside, torch.zeros(len(outside), dtype=torch.long))
    draws = _draws(len(given.data.validation[1]), HOW[context.mode], context.seed)
    rows = []
    for engine, link in ENGINES.items():
        found = {part: _joined(latents_of(engine, given, posterior, pair)) for part, pair in parts.items()}
        rows += [{"engine": engine, "points": len(some)} | _compare(found, link, some) for some in draws]
    return {"set": NAME, "rows": rows}


def _draws(count: int, how: Mapping[str, Any], seed: int) -> list[Tensor]:
    """Random parts of the validation images; the whole of them only once."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(n, how["draws"] if n < count else 1) for n in how["points"]]
    return [torch.randperm(count, generator=generator)[:n] for n, times in sizes for _ in range(times)]


def _joined(found: Latents) -> tuple[Gaussian, Tensor]:
    first, _ = found[0]
    mean, stored = (torch.cat([getattr(g, part) for g, _ in found]) for part in ("mean", "stored"))
    return first.with_stored(mean, stored), torch.cat([y for _, y in found])


def _compare(found: Mapping[str, tuple[Gaussian, Tensor]], link: str, rows: Tensor) -> dict[str, float]:
    latent, y = found["validation"]
    likelihood = CategoricalLikelihood(link)
    held = held_out([(latent.with_stored(latent.mean[rows], latent.stored[rows]), y[rows])], likelihood)
    report, fitted = calibrated(held, likelihood, 1.0, TOLERANCE)
    trials = Trials(held, likelihood)
    plain: Any = trials.likelihood_of(trials.plain)
    ours, theirs = (report.after, fitted), (trials.plain.scale, plain)
    (one, above), (base, below) = (_losses(found, each) for each in (ours, theirs))
    mean, error = paired(one, base)
    return {"scale": report.after, "nlpd": mean, "error": error, "auroc": above - below}


def _losses(found: Mapping[str, tuple[Gaussian, Tensor]], fitted: Fitted) -> tuple[Tensor, float]:
    """Of each test image, and the AUROC of the entropy."""
    inside, outside = (log_probs(fitted, [found[part]]) for part in ("test", "outliers"))
    losses = -inside.gather(1, found["test"][1][:, None])[:, 0]
    return losses, auroc(*(predictive_entropy(each.exp()) for each in (inside, outside)))


# -- the report

HEAD = ["engine", "validation points", "draws", "NLPD - that of temperature scaling", "worst draw", "AUROC gained"]


def lines(record: Record) -> list[list[str]]:
    """Cells of the table: for each engine and number of points, the mean over draws."""
    found = []
    for engine in ENGINES:
        mine = [row for row in record["rows"] if row["engine"] == engine]
        for points in dict.fromkeys(row["points"] for row in mine):
            some = [row for row in mine if row["points"] == points]
            gaps, gains = ([row[key] for row in some] for key in ("nlpd", "auroc"))
            cells = [engine, f"{points:,}", str(len(some)), f"{statistics.mean(gaps):+.4f}", f"{max(gaps):+.4f}"]
            found.append([*cells, f"{statistics.mean(gains):+.3f}"])
    return found


def markdown(record: Record) -> str:
    rows: Sequence[Sequence[str]] = [HEAD, ["---", *(["--:"] * (len(HEAD) - 1))], *lines(record)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
