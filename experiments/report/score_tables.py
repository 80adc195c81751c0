"""Scores of several predictors on one test set, and the tables and sentences made from what is stored of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from experiments.methods.classify import Batches, Predictor, bold, score
from experiments.methods.engines import CALIBRATED, LINEARISED, STREAMLINED
from experiments.report import html

Scores = Sequence[Mapping[str, Any]]
Published = Mapping[str, tuple[float, float | None]]  # metric -> value and standard error
METRICS = {"accuracy": "ACC", "nlpd": "NLPD", "ece": "ECE"}
ENGINES = (STREAMLINED, LINEARISED)
HEAD = ["method", "scale", *METRICS.values()]


def score_all(predictors: Iterable[Predictor], test: Batches) -> list[dict[str, Any]]:
    """Metrics of each; `agreement` is the share of points in which its class is that of the first predictor.

    `best` names the metrics in which it is the best, or not told apart from it.
    """
    inputs, y = [x for x, _ in test], torch.cat([y for _, y in test])
    shown = tqdm(predictors, desc="predicting", leave=False, disable=None)
    pairs = [(p.label, p(inputs).double()) for p in shown]
    found = [score(label, log_probs, y) for label, log_probs in pairs]
    classes = [log_probs.argmax(-1) for _, log_probs in pairs]
    agreement = [(c == classes[0]).double().mean().item() for c in classes]
    best = {
        "nlpd": bold([s.losses for s in found]),
        "accuracy": bold([s.hits for s in found], larger=True),
    }
    return [
        s.as_dict() | {"agreement": agreement[i], "best": [m for m in best if best[m][i]]} for i, s in enumerate(found)
    ]


def pick(scores: Scores, method: str, posterior: str = "", link: str = "", fitted: bool | None = None) -> Any:
    """The one score of that description, or None."""
    for s in scores:
        if (s["method"], s["posterior"], s["link"]) == (method, posterior, link) and fitted in (None, s["fitted"]):
            return s
    return None


def as_in_the_paper(s: Mapping[str, Any]) -> bool:
    """Sampling and GLM with the posterior as it is, ours with the probit link and a fitted scale."""
    return s["link"] in ("", "probit") and s["fitted"] == (s["method"] == "ours")


def title(s: Mapping[str, Any]) -> str:
    parts = [s["posterior"], s["method"], s["link"].replace("_", "-")]
    name = " ".join(p for p in parts if p)
    if s["method"] in ENGINES:
        return f"{name}, {s['form']}"
    if s["method"] in ("sampling", "GLM") and s["fitted"]:
        return f"{name}, scale fitted"
    return f"{name}, scale 1" if s["method"] == "ours" and not s["fitted"] else name


def table(scores: Scores, published: Callable[[Mapping[str, Any]], Published], caption: str = "") -> str:
    """One row for each score; `published` gives the paper's numbers for it, if there are any."""
    lines, before = [], ""
    for s in scores:
        theirs = published(s) if as_in_the_paper(s) else {}
        scale = "" if s["scale"] is None or not s["fitted"] else f"{s['scale']:.2g}"
        cells = [html.Cell(title(s), number=False), html.Cell(scale), *(cell(s, m, theirs) for m in METRICS)]
        lines.append(html.Line(cells, ours=s["method"] in ("ours", *ENGINES), start=s["posterior"] != before))
        before = s["posterior"]
    return html.table(HEAD, lines, caption)


def cell(s: Mapping[str, Any], metric: str, theirs: Published) -> html.Cell:
    text = _text(s[metric], s.get(f"{metric}_error"))
    return html.Cell(text, _text(*theirs[metric]) if metric in theirs else "", metric in s.get("best", ()))


def _text(value: float, error: float | None) -> str:
    return f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def readings(where: str, scores: Scores, posterior: str, published: Callable[[Mapping[str, Any]], Published]) -> list:
    """What the NLPDs of one posterior show, beside the paper's where it has them."""
    told = [pick(scores, m, posterior, link, m == "ours") for m, link in _PAPER]
    told = [s for s in told if s is not None]
    if len(told) < 2:
        return []
    ours = next(s for s in told if s["method"] == "ours")
    numbers = ", ".join(f"{_short(s)} {s['nlpd']:.3f}" for s in told)
    text = f"{where}, {posterior}: NLPD {numbers}"
    theirs = {s["method"]: published(s)["nlpd"][0] for s in told if "nlpd" in published(s)}
    if len(theirs) == len(told):
        text += f" (paper {', '.join(f'{v:.3f}' for v in theirs.values())}: {_order(told, theirs)})"
    rest = [s for s in scores if s["fitted"] and s["posterior"] in ("", posterior) and s is not ours]
    better = sorted((s for s in rest if s["nlpd"] < ours["nlpd"] - 5e-4), key=lambda s: s["nlpd"])
    names = ", ".join(f"{title(s)} {s['nlpd']:.3f}" for s in better[:3])
    return [f"{text}. " + (f"Below ours with a fitted number: {names}." if better else "No fitted method is below it.")]


def engines_table(where: str, scores: Scores | None) -> str:
    """Both engines in all forms, or that they were not run."""
    if scores is None:
        return html.paragraph(f"{where}, both engines with and without calibration: not run.")
    caption = (
        f"{where}, both engines: streamlined with the probit link, linearised with the mean-field one; calibrated is "
        "scale and temperature by `calibrate`. The networks have the settings of those above; if they were trained "
        "again they may differ a little: compare rows within a table."
    )
    return table(scores, lambda s: {}, caption)


def engines_readings(where: str, scores: Scores | None) -> list[str]:
    """NLPD of both engines, calibrated, beside that of temperature scaling."""
    if scores is None:
        return []
    lines = []
    for posterior in dict.fromkeys(s["posterior"] for s in scores if s["method"] in ENGINES):
        rows = [s for s in scores if s["posterior"] == posterior and s["form"] == CALIBRATED]
        base = pick(scores, "temperature scaling", "" if posterior == "LA" else posterior)
        told = ", ".join(f"{s['method']} {s['nlpd']:.3f} (ECE {s['ece']:.3f})" for s in (base, *rows))
        lines.append(f"{where}, {posterior}, calibrated: NLPD of {told}.")
    return lines


_PAPER = (("sampling", ""), ("GLM", "probit"), ("ours", "probit"))


def _short(s: Mapping[str, Any]) -> str:
    return f"{s['method']}, probit" if s["method"] == "ours" else s["method"]


def _order(told: Scores, theirs: Mapping[str, float]) -> str:
    """Whether ours stands to each of the others as it does in the paper."""
    here = {s["method"]: s["nlpd"] for s in told}
    others = [m for m in here if m != "ours"]
    same = [(here["ours"] < here[m]) == (theirs["ours"] < theirs[m]) for m in others]
    if all(same):
        return "same order"
    return "other order against " + " and ".join(m for m, s in zip(others, same, strict=True) if not s)
