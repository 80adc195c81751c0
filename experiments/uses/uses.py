"""`pg.tune` with its defaults on nine uses: is it ever worse than the plain model, and does it know far inputs?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import propagauss as pg
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.report import html
from experiments.uses.pictures import CLOTHES, DIGITS, SEGMENTATION, SEVERAL
from experiments.uses.tables import DIABETES, HETEROSCEDASTIC, POINTS
from experiments.uses.texts import BERT, LLAMA
from experiments.uses.use import Batches, Kind, Use
from propagauss import metrics
from propagauss.inputs import batches, taken_by
from propagauss.likelihoods.registry import as_likelihood
from propagauss.predictive.calibration import cache, paired
from propagauss.predictive.predictor import Predictor
from propagauss.tuning.predictors import predictor, with_class_dim

KINDS: dict[str, Kind] = {
    "points": POINTS,
    "digits": DIGITS,
    "diabetes": DIABETES,
    "bert": BERT,
    "cnn": CLOTHES,
    "llama": LLAMA,
    "segmentation": SEGMENTATION,
    "multi-label": SEVERAL,
    "heteroscedastic": HETEROSCEDASTIC,
}
SEEDS = {"full": 3, "quick": 1}
QUICK = ("diabetes", "segmentation")
TAKEN = "what its variance says, within two standard errors"  # how `tune` chooses among equally good predictors
LATENT = "around the mean over classes"  # the variance of logits
LIMIT = 2.0  # paired standard errors by which the tuned model may be worse


def units(context: Context) -> list[Unit]:
    seeds = range(SEEDS[context.mode])
    return [
        Unit(f"{name}-{i}", _config(name, i), partial(run, name=name, number=i))
        for name in (QUICK if context.quick else KINDS)
        for i in seeds
    ]


def _config(name: str, number: int) -> dict[str, Any]:
    config = {"seed": number, "defaults": True, "taken": TAKEN, "latent_variance": LATENT}
    return config | ({"far": KINDS[name].far} if KINDS[name].nearer else {})


def run(context: Context, name: str, number: int) -> Record:
    seed = context.seed + number
    torch.manual_seed(seed)
    use = KINDS[name].make(context, seed)
    best = pg.tune(use.model, use.train, use.validation, use.likelihood, progress=False)
    plain, tempered = _baselines(use)
    losses = {"tuned": _losses(best, use.test), "temperature": _losses(tempered, use.test)}
    losses["plain"] = _losses(plain, use.test) if plain is not None else losses["temperature"]
    row, has = best.leaderboard.winner, best.leaderboard.winner.engine != "plain"
    mean, error = paired(losses["tuned"], losses["plain"])
    return {
        "use": name,
        "seed": seed,
        "parameters": sum(p.numel() for p in use.model.parameters() if p.requires_grad),
        "points": {part: _count(getattr(use, part)) for part in ("train", "validation", "test")},
        "winner": {"name": row.name, "engine": row.engine, "cost": row.cost, "memory": row.memory},
        "why": best.leaderboard.why,
        "candidates": len(best.leaderboard),
        "failed": sorted({r.failure for r in best.leaderboard if r.failure}),
        "scale": best.scale,
        "nlpd": {method: each.mean().item() for method, each in losses.items()},
        "difference": [mean, error],
        "from_temperature": list(paired(losses["tuned"], losses["temperature"])),
        "auroc": _auroc(best, use, "epistemic") if has else None,
        "auroc_nearer": _auroc(best, replace(use, far=use.nearer), "epistemic") if has and use.nearer else None,
        "auroc_plain": _auroc(plain, use, "entropy") if plain is not None and _has_classes(use) else None,
        "auroc_variance": _auroc(best, use, "latent_variance") if has and _has_classes(use) else None,
    }


def _baselines(use: Use) -> tuple[Predictor | None, Predictor]:
    """The plain model as it is, None if that is no distribution, and with what its likelihood has to fit."""
    x, y = next(iter(batches(use.validation, taken_by(use.model))))
    likelihood = as_likelihood(use.likelihood)
    with torch.no_grad():
        output = likelihood.joined(use.model(**x) if isinstance(x, dict) else use.model(x))
    likelihood = with_class_dim(likelihood, getattr(output, "logits", output), y)
    net = pg.streamline(use.model, None, x)
    tempered = predictor(net, likelihood).calibrate(use.validation, progress=False)
    return None if use.likelihood == "regression" else predictor(net, likelihood), tempered


def _losses(found: Predictor, data: Batches) -> Tensor:
    """`-log p` of each test point, over its targets on average: `[N]`."""
    held, likelihood = cache(found.net, data, found.likelihood, False), found.likelihood
    rows = [-likelihood.log_predictive(moments.scaled(found.scale), y) for moments, y in held.batches]
    losses = torch.cat([each.reshape(len(each), -1).sum(1) for each in rows])
    return losses.detach() * (len(losses) / held.targets)


def _has_classes(use: Use) -> bool:
    return use.likelihood in ("classification", "binary")


def _auroc(found: Predictor, use: Use, by: str) -> float:
    """Far inputs against test inputs, by one of the fields of predictions, averaged over the targets of an input."""
    scores = [torch.from_numpy(getattr(found.predict(part, progress=False), by)) for part in (use.test, use.far)]
    near, far = (each.double().reshape(len(each), -1).mean(1) for each in scores)
    return metrics.auroc(torch.cat([near, far]), torch.arange(len(near) + len(far)) >= len(near))


def _count(data: Batches) -> int:
    return sum(len(batch["labels"] if isinstance(batch, dict) else batch[1]) for batch in data)


# -- the report

HEAD = [
    "use",
    "what won",
    "NLPD plain",
    "with temperature or noise fitted",
    "tuned",
    "tuned - plain",
    "in standard errors, each seed",
    "AUROC, far against near: epistemic",
    "latent variance",
    "entropy of the plain model",
    "cost",
]


def section(records: dict[str, Record]) -> Section:
    found = list(records.values())
    by_use = {name: [r for r in found if r["use"] == name] for name in KINDS}
    by_use = {name: rows for name, rows in by_use.items() if rows}
    lines = [html.Line(_cells(name, rows)) for name, rows in by_use.items()]
    each = [html.Line(_single(r), start=r["seed"] == rows[0]["seed"]) for rows in by_use.values() for r in rows]
    body = html.table(HEAD, lines) + "<h3>Every run</h3>" + html.table(SINGLE, each)
    readings = [*summary(found), *(f"Far inputs of {KINDS[n].title}: {KINDS[n].far}." for n in by_use)]
    return Section(body, readings, _markdown(by_use, summary(found)))


def _cells(name: str, rows: Sequence[Record]) -> list[str]:
    """Means over the seeds; the standard error of the mean difference is that of independent runs."""
    nlpd = [_mean([r["nlpd"][m] for r in rows]) for m in ("plain", "temperature", "tuned")]
    difference = _mean([r["difference"][0] for r in rows])
    error = math.sqrt(sum(r["difference"][1] ** 2 for r in rows)) / len(rows)
    winners = list(dict.fromkeys(r["winner"]["name"] for r in rows))
    return [
        KINDS[name].title,
        "; ".join(winners),
        *(f"{value:.4f}" for value in nlpd),
        f"{difference:+.4f} ± {error:.4f}",
        ", ".join(f"{_in_errors(r):+.1f}" for r in rows),
        _listed([r["auroc"] for r in rows]),
        _listed([r["auroc_variance"] for r in rows]),
        _listed([r["auroc_plain"] for r in rows]),
        ", ".join(f"{r['winner']['cost']:.1f}x" for r in rows),
    ]


def _listed(values: Sequence[float | None]) -> str:
    """Empty if there is none at all."""
    known = any(v is not None for v in values)
    return ", ".join("none" if v is None else f"{v:.3f}" for v in values) if known else ""


SINGLE = ["run", "what won", "plain", "temperature", "tuned", "tuned - plain", "in standard errors", "AUROC", "cost"]


def _single(r: Record) -> list[str]:
    mean, error = r["difference"]
    return [
        f"{KINDS[r['use']].title}, seed {r['seed']}",
        r["winner"]["name"],
        *(f"{r['nlpd'][m]:.4f}" for m in ("plain", "temperature", "tuned")),
        f"{mean:+.4f} ± {error:.4f}",
        f"{_in_errors(r):+.1f}",
        "" if r["auroc"] is None else f"{r['auroc']:.3f}",
        f"{r['winner']['cost']:.1f}x",
    ]


def _in_errors(r: Record) -> float:
    mean, error = r["difference"]
    return mean / error if abs(mean) > 1e-12 else 0.0  # less is rounding


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def summary(found: Sequence[Record]) -> list[str]:
    worse = [r for r in found if _in_errors(r) > LIMIT]
    better = [r for r in found if _in_errors(r) < -LIMIT]
    lines = [
        f"In {len(worse)} of {len(found)} runs the tuned predictor is worse than the plain model by more than "
        f"{LIMIT:g} paired standard errors on test data, and in {len(better)} it is better by more than that."
    ]
    lines += [f"Worse: {_single(r)[0]}, by {_in_errors(r):.1f} standard errors." for r in worse]
    plain = [r for r in found if r["winner"]["engine"] == "plain"]
    if plain:
        named = ", ".join(f"{_single(r)[0]} ({r['winner']['name']})" for r in plain)
        lines.append(f"No posterior won in {len(plain)} runs, so that these have no epistemic uncertainty: {named}.")
    known = [r for r in found if r["auroc"] is not None]
    if known:
        lines += [
            _told("`epistemic`", {_single(r)[0]: r["auroc"] for r in known}),
            _told("the better of `epistemic` and `latent_variance`", {_single(r)[0]: _better(r) for r in known}),
        ]
    nearer = [r for r in known if r.get("auroc_nearer") is not None]
    for name in dict.fromkeys(r["use"] for r in nearer):
        values = ", ".join(f"{r['auroc_nearer']:.3f}" for r in nearer if r["use"] == name)
        lines.append(f"{KINDS[name].title}: {KINDS[name].nearer}, which are not far, have an AUROC of {values}.")
    return lines


def _better(r: Record) -> float:
    return max(r["auroc"], r["auroc_variance"] or 0.0)


def _told(score: str, aurocs: dict[str, float]) -> str:
    """How well a score tells far from near inputs over all runs that have one, and where it does not."""
    ordered = sorted((value, name) for name, value in aurocs.items())
    (least, where), middle = ordered[0], statistics.median(aurocs.values())
    reached = sum(value > 0.5 for value in aurocs.values())
    return (
        f"By {score}, the AUROC of far against near inputs is above a half in {reached} of {len(ordered)} runs, "
        f"{middle:.3f} in the median, and {least:.3f} at the least ({where})."
    )


def _markdown(by_use: dict[str, list[Any]], lines: Sequence[str]) -> str:
    rows = [_cells(name, found) for name, found in by_use.items()]
    table = [f"| {' | '.join(HEAD)} |", f"|---|---|{'--:|' * (len(HEAD) - 2)}", *(f"| {' | '.join(r)} |" for r in rows)]
    return "\n".join([*table, "", *(f"- {line}" for line in lines)])


EXPERIMENT = Experiment(
    "uses",
    "Nine uses: tune with its defaults against the plain model",
    "Not in the paper; docs/how-to/tune.md",
    units,
    section,
    needs=("transformers", "peft"),
)
