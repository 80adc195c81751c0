"""What `calibrate` does for several tolerances, against the plain model and temperature scaling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.datasets import path
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.mnist.networks import MAP
from experiments.report import html
from experiments.tasks import calibration_points, calibration_text
from experiments.tasks.calibration_networks import CNN, FEWER, OTHER, POINTS, Kind, Subject, subject
from experiments.transformers.vit_networks import settings
from propagauss import metrics
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.likelihoods.categorical import CategoricalLikelihood
from propagauss.predictive.calibration import TOLERANCE, calibrated, held_out, latents, paired

TOLERANCES = (0.0, 0.5, 1.0, 2.0)
UNITS: tuple[tuple[Kind, str], ...] = (
    ("mlp", "mnist"),
    ("mlp", "fashion_mnist"),
    ("cnn", "fashion_mnist"),
    ("vit", "fashion_mnist"),
    ("text", "mrpc"),  # the last: it is left out where its model or data are not here
)
TITLES = {"mlp": "MLP", "cnn": "residual CNN", "vit": "small ViT", "text": "MiniLM", "mnist": "MNIST"}
TITLES |= {"fashion_mnist": "Fashion-MNIST", "mrpc": "MRPC", "wic": "sentence pairs of WiC"}
ENGINES = {"streamlined": "probit", "linearised": "mean_field"}  # and the link of each
METRICS = {"nlpd": "NLPD", "ece": "ECE", "aurc": "AURC", "auroc": "AUROC, entropy", "by_variance": "AUROC, variance"}

POINTS_UNIT = "points"

Latents = list[tuple[Gaussian, Tensor]]


def units(context: Context) -> list[Unit]:
    path(context, "images", "fashion_mnist.npz")
    common = {"tolerances": list(TOLERANCES), "points": POINTS[context.mode], "fewer": FEWER[context.mode]}
    own = {"mlp": {"map": MAP}, "cnn": {"cnn": CNN}, "vit": {"vit": settings(context)}}
    own["text"] = {"text": calibration_text.settings(context)}
    here = UNITS if calibration_text.present(context) else UNITS[:-1]
    found = [Unit(f"{kind}-{name}", common | own[kind], partial(run, kind=kind, name=name)) for kind, name in here]
    return [*found, Unit(POINTS_UNIT, calibration_points.config(context), calibration_points.run)]


def run(context: Context, kind: Kind, name: str) -> Record:
    given = subject(context, kind, name)
    plain = _latents(streamline(given.model, None, given.validation[0][0][:2]), given)
    rows = [_row("plain model", plain, CategoricalLikelihood(), None)]
    rows.append(_row("temperature scaling", plain, CategoricalLikelihood(), 0.0))
    for engine, link in ENGINES.items():
        found = _latents(_network(engine, given), given)
        rows += [_row(engine, found, CategoricalLikelihood(link), tolerance) for tolerance in TOLERANCES]
    base = rows[1]["losses"]
    for row in rows:
        row["against"] = list(paired(row.pop("losses"), base))  # temperature scaling
    return {"network": kind, "set": name, "test": sum(len(y) for _, y in given.test), "rows": rows}


def _network(engine: str, given: Subject) -> Any:
    make = streamline if engine == "streamlined" else linearise
    if given.lengths_differ and engine == "linearised":
        return calibration_text.ByLength(lambda x: make(given.model, given.posterior, x))
    return make(given.model, given.posterior, given.validation[0][0][:2])


def _latents(net: Any, given: Subject) -> dict[str, Latents]:
    parts = {"validation": given.validation, "test": given.test, "outliers": given.outliers}
    return {part: list(latents(net, data, False)) for part, data in parts.items()}


def _row(method: str, found: dict[str, Latents], likelihood: CategoricalLikelihood, tolerance: float | None) -> Any:
    """Metrics on test data; None as tolerance for what is not calibrated."""
    scale, temperature = 1.0, 1.0
    if tolerance is not None:
        report, likelihood = calibrated(held_out(found["validation"], likelihood), likelihood, 1.0, tolerance)
        scale, temperature = report.after, float(likelihood.temperature)
    inside, outside = (
        torch.cat([likelihood.log_probs(latent.scale(scale)).double() for latent, _ in found[part]])
        for part in ("test", "outliers")
    )
    y = torch.cat([labels for _, labels in found["test"]])
    losses = -inside.gather(1, y[:, None])[:, 0]
    confidence, top = inside.max(-1)
    variances = [torch.cat([latent.variance.mean(-1) for latent, _ in found[part]]) for part in ("test", "outliers")]
    row = {
        "method": method,
        "tolerance": tolerance,
        "scale": scale,
        "temperature": temperature,
        "nlpd": losses.mean().item(),
        "ece": metrics.ece(inside.exp(), y),
        "aurc": metrics.aurc(confidence, top == y),
        "auroc": _auroc(*(metrics.predictive_entropy(each.exp()) for each in (inside, outside))),
        "by_variance": _auroc(*variances) if bool(variances[0].any()) else None,
    }
    return row | {"losses": losses}


def _auroc(inside: Tensor, outside: Tensor) -> float:
    positive = torch.arange(len(inside) + len(outside)) >= len(inside)
    return metrics.auroc(torch.cat([inside, outside]), positive)


# -- the report


def section(records: dict[str, Record]) -> Section:
    found = [records[f"{kind}-{name}"] for kind, name in UNITS if f"{kind}-{name}" in records]
    body = "".join(f"<h3>{_title(r)}</h3>{html.table(HEAD, [_line(row) for row in r['rows']])}" for r in found)
    lines = [line for r in found for line in readings(r)]
    points = records.get(POINTS_UNIT)
    if points is not None:
        rows = [html.Line(each) for each in calibration_points.lines(points)]
        body += f"<h3>How many validation points</h3>{html.table(calibration_points.HEAD, rows)}"
    return Section(body, [*lines, *summary(found)], headline(found, points))


HEAD = ["method", "tolerance", "scale", "temperature", *METRICS.values(), "NLPD - that of temperature scaling"]


def _title(record: Record) -> str:
    return f"{TITLES[record['network']]}, {TITLES[record['set']]} (outliers {TITLES[OTHER[record['set']]]})"


def _line(row: Record) -> html.Line:
    return html.Line(cells(row), ours=row["tolerance"] == TOLERANCE, start=row["tolerance"] in (None, 0.0))


def cells(row: Record) -> list[str]:
    """Text of a row, in the order of `HEAD`."""
    engine = row["method"] in ENGINES
    numbers = [f"{row['tolerance']:g}", f"{row['scale']:.2g}"] if engine else ["", ""]
    temperature = "" if row["tolerance"] is None else f"{row['temperature']:.2f}"
    values = ["" if row[m] is None else f"{row[m]:.4f}" for m in METRICS]
    mean, error = row["against"]
    return [row["method"], *numbers, temperature, *values, f"{mean:+.4f} ± {error:.4f}"]


def readings(record: Record) -> list[str]:
    """Whether what is promised of the default tolerance holds."""
    base, lines = record["rows"][1], []
    for engine in ENGINES:
        row = next(r for r in record["rows"] if r["method"] == engine and r["tolerance"] == TOLERANCE)
        mean, error = row["against"]
        lines.append(
            f"{_title(record)}, {engine}, default tolerance: NLPD {mean:+.4f} ± {error:.4f} against temperature "
            f"scaling ({_verdict(mean, error)}), AUROC of the entropy {row['auroc']:.3f} against {base['auroc']:.3f}."
        )
    return lines


def _verdict(mean: float, error: float) -> str:
    return "better" if mean < -error else "within one standard error" if mean <= error else "worse"


def headline(records: Sequence[Record], points: Record | None = None) -> str:
    """The table of the documentation: all tolerances for the exact engine, the default one for the other."""
    lines = [f"| {' | '.join(HEAD)} |", f"|---|{'--:|' * (len(HEAD) - 1)}"]
    for record in records:
        lines.append(f"| **{_title(record)}** |{' |' * (len(HEAD) - 1)}")
        shown = (r for r in record["rows"] if r["method"] != "streamlined" or r["tolerance"] == TOLERANCE)
        lines += [f"| {' | '.join(cells(row))} |" for row in shown]
    lines += ["", *(f"- {line}" for line in summary(records))]
    if points is not None:
        where = f"**By the number of validation points** (MLP of VaLLA's protocol, {TITLES[points['set']]}; test data):"
        lines += ["", where, "", calibration_points.markdown(points)]
    return "\n".join(lines)


def summary(records: Sequence[Record]) -> list[str]:
    """What each tolerance costs and brings, over all networks."""
    lines = []
    for engine, tolerance in ((e, t) for e in reversed(ENGINES) for t in TOLERANCES if records):
        pairs = [(r, record["rows"][1]) for record in records for r in record["rows"]]
        pairs = [(r, base) for r, base in pairs if (r["method"], r["tolerance"]) == (engine, tolerance)]
        # without an error they are the same predictions
        worst = max(mean / error if error else 0.0 for mean, error in (r["against"] for r, _ in pairs))
        gain = sum(r["auroc"] - base["auroc"] for r, base in pairs) / len(pairs)
        ratios = [r["aurc"] / base["aurc"] - 1 for r, base in pairs if base["aurc"]]
        ranking = sum(ratios) / max(1, len(ratios))
        lines.append(
            f"{engine}, tolerance {tolerance:g}: against temperature scaling, the NLPD is at worst {worst:+.1f} "
            f"standard errors away (paired), the AUROC of the entropy {gain:+.3f} and the AURC {ranking:+.1%} on "
            "average."
        )
    return lines


EXPERIMENT = Experiment(
    "calibration",
    "Calibration: a temperature after the link, and how much of the posterior's variance to keep",
    "Not in the paper; docs/how-to/calibration.md",
    units,
    section,
)
