"""Vision transformers with random attention layers, MLPs or head: the paper's tables, on a smaller ViT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets import DataMissing, available, batches
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.methods import draws
from experiments.methods.classify import Batches, Predictor, Remembered, glm, ours, plain
from experiments.methods.engines import both
from experiments.published import vit as published
from experiments.report import html, score_tables
from experiments.transformers.vit_networks import (
    PARTS,
    Kind,
    Part,
    Prefix,
    from_checkpoint,
    settings,
    tokens,
    trained,
    tuned,
    tuning,
)
from propagauss.posteriors import Posterior

__all__ = ["EXPERIMENT", "evaluate", "from_checkpoint", "predictors", "trained", "tuned"]

TITLES = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
WORDS = {"attention": "attention of the last two blocks", "mlp": "MLPs of the last two blocks", "head": "last layer"}
FULL = {"samples": 50, "fit_samples": 10, "fit_points": 300}  # draws, and those for the scale of sampling
QUICK = {"samples": 5, "fit_samples": 2, "fit_points": 30}
ENGINES = "-engines"
Fitted = Mapping[Kind, tuple[nn.Module, Posterior]]


def units(context: Context) -> list[Unit]:
    names = [n for n in TITLES if available(context, "images", f"{n}.npz")]
    if not names:
        raise DataMissing("images/cifar10.npz or images/fashion_mnist.npz is needed (docs/experiments.md)")
    found = []
    for name in names[:1] if context.quick else names:
        for part in PARTS:
            how = {kind: tuning(context, kind) for kind in _kinds(part)}
            config = settings(context) | {"tuning": how} | drawn(context)
            found.append(Unit(f"{name}-{part}", config, partial(_run, name=name, part=part)))
            config = settings(context) | {"tuning": how}
            found.append(Unit(f"{name}-{part}{ENGINES}", config, partial(_run_engines, name=name, part=part)))
    return found


def _run(context: Context, name: str, part: Part) -> Record:
    sequences = tokens(context, name)
    fitted: Fitted = {kind: tuned(context, name, part, kind) for kind in _kinds(part)}
    validation, test = batches(sequences.validation, 250), batches(sequences.test, 250)
    chosen = {kind: sum(_numel(model, n) for n in posterior.names) for kind, (model, posterior) in fitted.items()}
    return {
        "data": name,
        "part": part,
        "parameters": chosen["LA"],
        "prior_precision": fitted["LA"][1].details["prior_precision"],
        "counts": {"validation": len(sequences.validation[1]), "test": len(sequences.test[1])},
        "scores": evaluate(fitted, validation, test, drawn(context), context.seed),
    }


def _run_engines(context: Context, name: str, part: Part) -> Record:
    """Both engines with and without calibration."""
    sequences = tokens(context, name)
    validation, test = batches(sequences.validation, 250), batches(sequences.test, 250)
    found: list[Predictor] = []
    for kind in _kinds(part):
        model, posterior = tuned(context, name, part, kind)
        found += [_at_mean(p) if kind == "MFVI" else p for p in plain(model, validation)]
        found += [p for group in both(model, posterior, kind, validation) for p in group]
    return {"data": name, "part": part, "engines": score_tables.score_all(found, test)}


def evaluate(
    fitted: Fitted, validation: Batches, test: Batches, samples: Mapping[str, int] = FULL, seed: int = 0
) -> list[dict[str, Any]]:
    """All methods on one test set. `fitted` has a model and its posterior for "LA", and may have them for "MFVI"."""
    return score_tables.score_all(_predictors(fitted, validation, samples, seed), test)


def predictors(context: Context, name: str, part: Part) -> list[Predictor]:
    """All methods for one data set and random part, as functions of images in [0, 1] of its size."""
    model, _ = trained(context, name)
    validation = batches(tokens(context, name).validation, 250)
    fitted: Fitted = {kind: tuned(context, name, part, kind) for kind in _kinds(part)}
    prefix = Remembered(Prefix(model))
    return [on_images(p, prefix) for p in _predictors(fitted, validation, drawn(context), context.seed)]


@dataclass(frozen=True)
class OnImages(Predictor):
    """A predictor whose inputs go through a function first."""

    inner: Predictor
    prefix: Any

    def __call__(self, inputs: Iterable[Tensor]) -> Tensor:
        with torch.no_grad():
            return self.inner([self.prefix(x) for x in inputs])


def on_images(predictor: Predictor, prefix: Any) -> Predictor:
    return OnImages(predictor.label, lambda x: predictor.log_probs(prefix(x)), predictor, prefix)


def _predictors(fitted: Fitted, validation: Batches, samples: Mapping[str, int], seed: int) -> list[Predictor]:
    found = plain(fitted["LA"][0], validation)
    for kind, (model, posterior) in fitted.items():
        if kind == "MFVI":
            found += [_at_mean(p) for p in plain(model, validation)]
        found += draws.sampling(model, posterior, kind, validation, **samples, seed=seed)
        found += glm(model, posterior, kind, validation) if kind == "LA" else []
        found += ours(model, posterior, kind, validation)
    return found


def _at_mean(p: Predictor) -> Predictor:
    """The plain model of MFVI is the mean of its posterior."""
    method = {"MAP": "mean weights"}.get(p.label.method, p.label.method)
    return replace(p, label=replace(p.label, method=method, posterior="MFVI"))


def _kinds(part: Part) -> tuple[Kind, ...]:
    return ("LA",) if part == "head" else ("LA", "MFVI")


def drawn(context: Context) -> dict[str, int]:
    return QUICK if context.quick else FULL


def _numel(model: nn.Module, name: str) -> int:
    return model.get_parameter(name).numel()


# -- the report


def _published(record: Record, s: Mapping[str, Any]) -> score_tables.Published:
    if record["data"] != "cifar10":
        return {}
    return published.CIFAR10[record["part"]].get((s["posterior"], s["method"]), {})


def section(records: dict[str, Record]) -> Section:
    body, lines = [html.paragraph(_NOTE)], []
    exact = {key.removesuffix(ENGINES): r["engines"] for key, r in records.items() if key.endswith(ENGINES)}
    records = {key: r for key, r in records.items() if not key.endswith(ENGINES)}
    for record in sorted(records.values(), key=lambda r: (list(TITLES).index(r["data"]), list(PARTS).index(r["part"]))):
        where = f"{TITLES[record['data']]}, {WORDS[record['part']]}"
        theirs = partial(_published, record)
        label = published.TABLES[record["part"]]
        caption = (
            f"{record['parameters']:,} random parameters, prior precision {record['prior_precision']:.3g}; "
            f"{record['counts']['test']:,} test images."
        )
        if record["data"] == "cifar10":
            caption += f" Grey: ViT-base, {label}."
        body.append(f"<h3>{where}</h3>" + score_tables.table(record["scores"], theirs, caption))
        more = exact.get(f"{record['data']}-{record['part']}")
        body.append(score_tables.engines_table(where, more))
        lines += score_tables.engines_readings(where, more)
        for kind in _kinds(record["part"]):
            lines += score_tables.readings(where, record["scores"], kind, theirs)
    return Section("".join(body), [*lines, *_parts_reading(records)])


_NOTE = (
    "A Hugging Face ViT with 17 tokens, trained here from scratch on 9,000 images, stands in for the paper's ViT-base "
    "with ImageNet weights: accuracies are far lower, so compare orders, not sizes. The layers named are then "
    "fine-tuned and random; everything before them is fixed. Bold: best, or not told apart from it by a paired t-test."
)


def _parts_reading(records: dict[str, Record]) -> list[str]:
    """The paper finds that more random layers are better than the last one alone."""
    found = []
    for name, text in TITLES.items():
        nlpd = {}
        for part in PARTS:
            record = records.get(f"{name}-{part}")
            s = record and score_tables.pick(record["scores"], "ours", "LA", "probit", True)
            if s:
                nlpd[part] = s["nlpd"]
        if len(nlpd) == len(PARTS):
            numbers = ", ".join(f"{part} {value:.3f}" for part, value in nlpd.items())
            best = min(nlpd, key=lambda part: nlpd[part])
            says = (
                "unlike in the paper, the last layer alone is best"
                if best == "head"
                else "as in the paper, "
                + ("the last layer alone is not the best" if nlpd["head"] < max(nlpd.values()) else "it is last")
            )
            found.append(f"{text}: NLPD of ours (LA, probit) by random part: {numbers}; {says}.")
    return found


EXPERIMENT = Experiment(
    "vit",
    "Vision transformers",
    "Tables tab:vit_attention, tab:vit_mlp and table:vit-last-layer",
    units,
    section,
    needs=("transformers", "ivon"),
)
