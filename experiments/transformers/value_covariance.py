"""Attention values: their covariance within a head against variances only, on the networks of the vit experiment."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from experiments.datasets import batches
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.methods.classify import LINKS, Batches, Remembered, _gaussian, score
from experiments.published import value_covariance as published
from experiments.report import html, score_tables
from experiments.transformers import vit
from experiments.transformers.vit_networks import Kind, settings, tokens, tuned, tuning
from propagauss.engines.streamline import streamline

Kept = Literal["covariance", "variance"]
KEPT: tuple[Kept, ...] = ("covariance", "variance")
KINDS: tuple[Kind, ...] = ("MFVI", "LA")


def units(context: Context) -> list[Unit]:
    names = [unit.key.removesuffix("-attention") for unit in vit.units(context) if unit.key.endswith("-attention")]
    config = settings(context) | {"tuning": {kind: tuning(context, kind) for kind in KINDS}}
    return [Unit(name, config, partial(_run, name=name)) for name in names]


def _run(context: Context, name: str) -> Record:
    sequences = tokens(context, name)
    validation, test = batches(sequences.validation, 250), batches(sequences.test, 250)
    found = [_kind(context, name, kind, validation, test) for kind in KINDS]
    return {"data": name, "test": len(sequences.test[1]), "kinds": dict(zip(KINDS, found, strict=True))}


@torch.no_grad()
def _kind(context: Context, name: str, kind: Kind, validation: Batches, test: Batches) -> Record:
    """Scores with either, and how far the standard deviations of the logits are apart."""
    model, posterior = tuned(context, name, "attention", kind)
    inputs, y = [x for x, _ in test], torch.cat([y for _, y in test])
    scores, stddevs = {}, {}
    for kept in KEPT:
        net = Remembered(streamline(model, posterior, inputs[0][:2], attention=kept))
        predictors = _gaussian(net, "ours", kind, "", validation, LINKS, (True,))
        scores[kept] = [score(p.label, p(inputs).double(), y).as_dict() for p in predictors]
        stddevs[kept] = torch.cat([net(x).stddev for x in inputs])
    ratio = stddevs["covariance"] / stddevs["variance"]
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=ratio.dtype)
    low, median, high = ratio.flatten().quantile(levels).tolist()
    return {"scores": scores, "stddev_ratio": {"low": low, "median": median, "high": high}}


# -- the report


def section(records: dict[str, Record]) -> Section:
    lines, sentences = [], []
    for name, record in records.items():
        for kind in KINDS:
            found = record["kinds"][kind]
            where = f"{vit.TITLES[name]}, {kind}"
            for kept in KEPT:
                lines.append(_line(where, name, kind, kept, found["scores"][kept], kept == KEPT[0]))
            sentences.append(_reading(where, found))
    head = ["values", *(f"{text}{link}" for link in ("", ", mean-field") for text in score_tables.METRICS.values())]
    caption = (
        "Random attention layers of the last two blocks; probit link with fitted scale, as in the paper, and "
        f"mean-field link. Grey: ViT-base on CIFAR-10, {', '.join(published.TABLES.values())}."
    )
    return Section(html.table(head, lines, caption), sentences)


def _line(where: str, name: str, kind: Kind, kept: Kept, scores: Any, start: bool) -> html.Line:
    cells = [html.Cell(f"{where}, {kept}", number=False)]
    for link in ("probit", "mean_field"):
        s = score_tables.pick(scores, "ours", kind, link, True)
        theirs = published.CIFAR10[kind][kept] if name == "cifar10" and link == "probit" else {}
        cells += [score_tables.cell(s, metric, theirs) for metric in score_tables.METRICS]
    return html.Line(cells, start=start)


def _reading(where: str, found: Mapping[str, Any]) -> str:
    gaps = []
    for metric, text in score_tables.METRICS.items():
        one, other = (_paper_score(found["scores"][kept])[metric] for kept in KEPT)
        gaps.append(f"{text} {one - other:+.4f}")
    ratio = found["stddev_ratio"]
    small = all(abs(float(gap.split()[-1])) < 0.005 for gap in gaps)
    says = "as in the paper, almost the same" if small else "unlike in the paper, not the same"
    return (
        f"{where}: covariance minus variance only, scales fitted for each: {', '.join(gaps)}: {says}. Before scaling, "
        f"the standard deviation of a logit is {ratio['median']:.2f} times as large with covariances (5% to 95%: "
        f"{ratio['low']:.2f} to {ratio['high']:.2f})."
    )


def _paper_score(scores: Any) -> Any:
    return next(s for s in scores if s["method"] == "ours" and score_tables.as_in_the_paper(s))


EXPERIMENT = Experiment(
    "value-covariance",
    "Covariance of attention values",
    "Tables “table: vit_cov_nlpd”, “table: vit_cov_acc” and “table: vit_cov_ece”",
    units,
    section,
    needs=("transformers", "ivon"),
)
