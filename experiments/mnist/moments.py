"""Local linearisation against moment matching of the activations, diagonal LA."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from experiments.datasets import batches
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.methods import mlp
from experiments.methods.classify import LINKS, Predictor, plain
from experiments.mnist.mnist import SWEEP, Measured, evaluate, key, mean_nlpd, rows, sets, some
from experiments.mnist.networks import MAP, Trained, laplace, map_network
from experiments.mnist.readings import TITLES, verdict
from experiments.published import moments as published
from experiments.report import html
from propagauss.demo.report import plots
from propagauss.posteriors import Posterior
from propagauss.posteriors.precision import with_prior_precision

Way = Literal["linearise", "moments"]
WAYS: tuple[Way, ...] = ("linearise", "moments")
TUNED = ", prior tuned"


def units(context: Context) -> list[Unit]:
    return [unit(context, name) for name in sets(context)]


def unit(context: Context, name: str) -> Unit:
    config = {"set": name, "map": MAP, "sweep": SWEEP[context.mode], "version": 2}
    return Unit(name, config, lambda context: measure(context, name))


def measure(context: Context, name: str) -> dict[str, Any]:
    """Both ways on the test set, with every link; and the NLPD for a range of prior precisions."""
    trained, posterior = map_network(context, name), laplace(context, name, "diagonal")
    validation = batches(trained.data.validation)
    groups = [plain(trained.model, validation)]
    groups += [mlp.ours(trained.model, posterior, "LA", validation, LINKS, way, activation=way) for way in WAYS]
    sweep = sweep_precision(trained, posterior, SWEEP[context.mode])
    groups += [[tuned(trained, posterior, sweep, way)] for way in WAYS]
    scores = [s for group in groups for s in evaluate(group, trained.data.test)]
    return {
        "rows": rows(scores),
        "differences": {ending: difference(scores, ending) for ending in ("", TUNED)},
        "sweep": sweep,
        "prior_precision": posterior.details["prior_precision"],
        "points": len(trained.data.test[1]),
    }


def difference(scores: Sequence[Measured], ending: str) -> dict[str, float]:
    """NLPD with linearisation minus that with moment matching: probit link, scale fitted."""
    found = {key(s.label): s.losses for s in scores}
    one, other = (found[f"LA ours probit {way}{ending}"] for way in WAYS)
    gap = one - other
    return {"mean": gap.mean().item(), "error": gap.std().item() / math.sqrt(len(gap))}


@torch.no_grad()
def sweep_precision(trained: Trained, posterior: Posterior, factors: Sequence[float]) -> list[dict[str, Any]]:
    """NLPD on some validation images, on which the scale is fitted, and test images; same curvature, other priors."""
    found = []
    parts = {"validation": some(trained.data.validation), "test": some(trained.data.test)}
    for factor in factors:
        precision = factor * posterior.details["prior_precision"]
        changed = with_prior_precision(posterior, precision)
        entry: dict[str, Any] = {"prior_precision": precision}
        for way in WAYS:
            fitted, _ = mlp.ours(
                trained.model, changed, "LA", batches(parts["validation"]), ("probit",), activation=way
            )
            entry[way] = {part: mean_nlpd(fitted.log_probs, pair) for part, pair in parts.items()}
        found.append(entry)
    return found


def tuned(trained: Trained, posterior: Posterior, sweep: Sequence[Record], way: Way) -> Predictor:
    """With the prior precision of least NLPD on validation images."""
    precision = min(sweep, key=lambda e: e[way]["validation"])["prior_precision"]
    changed, validation = with_prior_precision(posterior, precision), batches(trained.data.validation)
    return mlp.ours(trained.model, changed, "LA", validation, ("probit",), way + TUNED, activation=way)[0]


# -- the report


def section(records: dict[str, Record]) -> Section:
    known = {name: records[name] for name in TITLES if name in records}
    caption = (
        "NLPD on 2,000 test images, scale fitted, for posteriors with the same curvature and other prior precisions. "
        "The vertical line is the precision of largest marginal likelihood."
    )
    body = "".join(_table(name, record) for name, record in known.items())
    body += html.figure(sweep_plot(known), caption)
    return Section(body, [line for name, record in known.items() for line in readings(name, record)])


def readings(name: str, record: Record) -> list[str]:
    found = {row["key"]: row for row in record["rows"]}
    paper = published.NLPD.get(name)
    beside = f" (paper {paper['linearise']} and {paper['moments']})" if paper else ""
    lines = []
    for ending, words in (("", f"{beside}"), (TUNED, ", both with the prior tuned on validation images")):
        ours, other = (found[f"LA ours probit {way}{ending}"] for way in WAYS)
        gap, error = record["differences"][ending]["mean"], record["differences"][ending]["error"]
        lines.append(
            f"{TITLES[name]}: NLPD {ours['nlpd']:.4f} linearised, {other['nlpd']:.4f} with moment matching{words}; "
            f"difference {gap:+.4f} ± {error:.4f}: {verdict(gap, error, 'linearisation')}. ACC {ours['accuracy']:.4f} "
            f"and {other['accuracy']:.4f}, ECE {ours['ece']:.4f} and {other['ece']:.4f}; MAP has ACC "
            f"{found['MAP']['accuracy']:.4f}."
        )
    wide, narrow = record["sweep"][0], record["sweep"][-1]
    far, near = (e["moments"]["test"] - e["linearise"]["test"] for e in (wide, narrow))
    if far > 0 and far > 2 * abs(near):
        lines.append(
            f"{TITLES[name]}: moment matching is {far:.4f} worse at a prior precision of {wide['prior_precision']:.2g} "
            f"and {near:+.4f} at {narrow['prior_precision']:.2g}. Its mean takes in part of the variance before each "
            "activation, and a scale fitted at the end cannot take that back."
        )
    return lines


def _table(name: str, record: Record) -> str:
    lines = [_line(row, name) for row in record["rows"]]
    caption = (
        f"{TITLES[name]}, {record['points']:,} test images. Bold: best, or not told apart from it by a paired t-test "
        "at 5%. Scale fitted on validation images, except “as it is”; prior tuned: the prior precision, too."
    )
    return f"<h3>{TITLES[name]}</h3>" + html.table(["", "ACC", "NLPD", "ECE", "scale"], lines, caption)


def _line(row: Mapping[str, Any], name: str) -> html.Line:
    way = row["form"] if row["link"] == "probit" and row["fitted"] and row["form"] in WAYS else ""

    def beside(table: dict[str, dict[str, float]]) -> str:
        return f"{table[name][way]:.3f}" if way and name in table else ""

    cells = [
        row["key"].replace("_", "-"),
        html.Cell(f"{row['accuracy']:.4f} ± {row['accuracy_error']:.4f}", beside(published.ACC), row["best_accuracy"]),
        html.Cell(f"{row['nlpd']:.4f} ± {row['nlpd_error']:.4f}", beside(published.NLPD), row["best_nlpd"]),
        html.Cell(f"{row['ece']:.4f}", beside(published.ECE)),
        "" if row["scale"] is None else f"{row['scale']:.3g}",
    ]
    return html.Line(cells, ours=row["form"].startswith("linearise"), start=row["link"] == "probit" and row["fitted"])


def sweep_plot(known: Mapping[str, Record]) -> str:
    """NLPD against the prior precision, one panel for each set."""
    styles = {"linearise": (plots.COLOURS[plots.OURS], "linearisation"), "moments": ("#b8860b", "moment matching")}
    with plots.drawing(3.2 * len(known), 2.7) as (figure, svg):
        axes = figure.subplots(1, len(known), squeeze=False)[0]
        for axis, (name, record) in zip(axes, known.items(), strict=True):
            x = [entry["prior_precision"] for entry in record["sweep"]]
            for way, (colour, label) in styles.items():
                axis.plot(x, [entry[way]["test"] for entry in record["sweep"]], color=colour, label=label)
            axis.axvline(record["prior_precision"], color=plots._INK, linewidth=0.8, alpha=0.5)
            axis.set(xscale="log", title=TITLES[name], xlabel="prior precision")
            axis.grid()
        axes[0].set_ylabel("NLPD")
        axes[-1].legend()
        return svg()


EXPERIMENT = Experiment(
    "moments", "Linearisation against moment matching", f"The paper's {published.LABEL}", units, section
)
