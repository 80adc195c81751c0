"""Regression on eleven UCI sets: MFVI (sampling, ours) and LA with a full covariance (sampling, GLM, ours)."""

from __future__ import annotations

from functools import partial
from typing import Any

from experiments import datasets
from experiments.frame.experiment import Context, Experiment, Unit
from experiments.uci import calibrated
from experiments.uci.data import FOLDS, SETS, load, split
from experiments.uci.layers import compare
from experiments.uci.methods import glm_scores, map_scores, moments, our_scores, sampling_scores
from experiments.uci.posteriors import Fitted, laplace, mean_field
from experiments.uci.report import section
from propagauss.demo.data import Split

FULL = {"map_steps": 1000, "ivon_steps": 4000, "samples": 1000, "rows": None, "hidden": None}
QUICK = {"map_steps": 40, "ivon_steps": 80, "samples": 20, "rows": 200, "hidden": 20}
SMALL = 200  # points; folds of such a set differ much
QUICK_SETS, QUICK_FOLDS = ("servo", "ccpp"), 2


def units(context: Context) -> list[Unit]:
    """Two for each set and fold, and one for each set about the layers in its first fold (all folds of small sets).

    Sets whose file is missing are left out, unless all are.
    """
    names, settings = (QUICK_SETS, QUICK) if context.quick else (tuple(SETS), FULL)
    present = [n for n in names if datasets.available(context, "uci", f"{n}.csv")] or names
    folds = [
        Unit(f"{name}-{fold}", {"set": name, "fold": fold} | settings, partial(run_fold, name, fold))
        for name in present
        for fold in range(QUICK_FOLDS if context.quick else FOLDS)
    ]
    about = {key: settings[key] for key in ("map_steps", "rows", "hidden")}
    layers = [(n, fold) for n in present for fold in range(FOLDS if SETS[n].n < SMALL and not context.quick else 1)]
    beside = [
        Unit(f"layers-{n}" + f"-{fold}" * (fold > 0), {"set": n, "fold": fold} | about, partial(run_layers, n, fold))
        for n, fold in layers
    ]
    trained = {key: value for key, value in settings.items() if key != "samples"}
    again = [(n, fold) for n in present for fold in range(1 if context.quick else FOLDS)]
    return [
        *folds,
        *beside,
        *(
            Unit(f"{calibrated.PREFIX}{n}-{fold}", {"set": n, "fold": fold} | trained, partial(run_calibrated, n, fold))
            for n, fold in again
        ),
    ]


def prepare(name: str, fold: int, context: Context) -> tuple[Split, list[int], dict[str, Any]]:
    """One fold of a set, the sizes of its network, and the settings of the mode."""
    settings = QUICK if context.quick else FULL
    x, y = load(context, name)
    sizes = [x.shape[1], *((settings["hidden"] or h) for h in SETS[name].hidden), 1]
    return split(x, y, fold, context.seed, settings["rows"]), sizes, settings


def run_layers(name: str, fold: int, context: Context) -> dict[str, Any]:
    """How much the covariance between layers matters."""
    parts, sizes, settings = prepare(name, fold, context)
    return {"set": name, "scores": compare(laplace(parts, sizes, settings["map_steps"], context.seed), parts)}


def run_fold(name: str, fold: int, context: Context) -> dict[str, Any]:
    """All methods on one fold."""
    parts, sizes, settings = prepare(name, fold, context)
    fitted = laplace(parts, sizes, settings["map_steps"], context.seed)
    chosen = {"LA": _chosen(fitted)}
    scores = [
        *map_scores(fitted, parts),
        *sampling_scores("LA", fitted, parts, settings["samples"], context.seed),
        *glm_scores("LA", fitted, parts),
        *our_scores("LA", fitted, parts),
    ]
    fitted = mean_field(parts, sizes, settings["ivon_steps"], context.seed)
    chosen["MFVI"] = _chosen(fitted)
    scores += [
        *sampling_scores("MFVI", fitted, parts, settings["samples"], context.seed),
        *glm_scores("MFVI", fitted, parts),
        *our_scores("MFVI", fitted, parts),
    ]
    return {
        "set": name,
        "fold": fold,
        "parts": parts.sizes,
        "hyperparameters": chosen,
        "scores": {s.name: s.as_dict() for s in scores},
        "losses": moments([s.losses for s in scores]),
        "errors": moments([s.errors for s in scores]),
    }


def run_calibrated(name: str, fold: int, context: Context) -> dict[str, Any]:
    """Both engines with scale and noise fitted together, on one fold."""
    parts, sizes, settings = prepare(name, fold, context)
    scores = calibrated.scores("LA", laplace(parts, sizes, settings["map_steps"], context.seed), parts)
    scores += calibrated.scores("MFVI", mean_field(parts, sizes, settings["ivon_steps"], context.seed), parts)
    return {
        "set": name,
        "fold": fold,
        "calibrated": True,
        "parts": parts.sizes,
        "scores": {s.name: s.as_dict() for s in scores},
        "losses": moments([s.losses for s in scores]),
    }


def _chosen(fitted: Fitted) -> dict[str, float]:
    return {"noise": fitted.noise, "prior_precision": fitted.prior_precision}


EXPERIMENT = Experiment(
    "uci",
    "Regression on UCI sets",
    "table:regression_nlpd, table:regression_rmse, table:uci-dataset",
    units,
    section,
    needs=("ivon",),
)
