"""MNIST-like images, one 784-128-64-C network for each set: LA with Kronecker factors, and mean-field VI."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.datasets import Pair, available, batches, path
from experiments.frame.experiment import Context, Experiment, Mode, Record, Section, Unit
from experiments.methods import mlp
from experiments.methods.classify import Batches, Label, Predictor, Score, bold, score
from experiments.mnist import engines
from experiments.mnist import training as mnist_training
from experiments.mnist.networks import IVON, MAP, Trained, ivon_network, laplace, map_network
from experiments.mnist.readings import OURS, REQUIRED, TITLES, Rows, readings
from experiments.published import mnist as published
from experiments.report import html
from propagauss import metrics
from propagauss.demo.methods import Sampler
from propagauss.demo.report import plots
from propagauss.posteriors import KroneckerPosterior
from propagauss.posteriors.precision import with_prior_precision

SAMPLES = {"full": 1000, "quick": 5}
SWEEP = {"full": [10 ** (k / 2) for k in range(-1, 9)], "quick": [1.0, 100.0]}  # times the marginal likelihood's choice
SWEEP_DRAWS, SWEEP_POINTS = {"full": 100, "quick": 3}, 2000


@dataclass
class Measured(Score):
    ece_floor: float


def units(context: Context) -> list[Unit]:
    if context.quick:  # the first set; the experiment `moments` takes all of them
        return [unit(context, sets(context)[0]), engines.units(context, sets(context)[0])[0]]
    found = [unit(context, name) for name in sets(context)]
    trained = [mnist_training.unit(name) for name in sets(context) if name in REQUIRED]
    return found + trained + [one for name in sets(context) for one in engines.units(context, name)]


def sets(context: Context) -> list[str]:
    """The data sets that are there; an error if none is."""
    found = [name for name in TITLES if available(context, "images", f"{name}.npz")]
    if not found:
        path(context, "images", "mnist.npz")
    return found


def unit(context: Context, name: str) -> Unit:
    config = {"set": name, "map": MAP, "ivon": IVON, "samples": SAMPLES[context.mode], "sweep": SWEEP[context.mode]}
    config |= {"version": 2}
    return Unit(name, config, lambda context: measure(context, name))


def measure(context: Context, name: str) -> dict[str, Any]:
    """Scores of all predictors on the test set, and the NLPD for a range of prior precisions."""
    samples = SAMPLES[context.mode]
    trained, posterior = map_network(context, name), laplace(context, name, "kronecker")
    assert isinstance(posterior, KroneckerPosterior)
    validation, test = batches(trained.data.validation), trained.data.test
    scores: list[Measured] = []
    for group in mlp.laplace_groups(trained.model, posterior, validation, samples):
        scores += evaluate(group, test)
    sweep = refined_sweep(trained, posterior, context.mode)
    for group in tuned_groups(trained, posterior, validation, sweep, samples):
        scores += evaluate(group, test)
    ivon, mean_field = ivon_network(context, name)
    for group in mlp.mfvi_groups(ivon.model, mean_field, validation, samples):
        scores += evaluate(group, test)
    return {
        "rows": rows(scores),
        "differences": differences(scores),
        "sweep": sweep,
        "points": len(test[1]),
        "validation_points": len(trained.data.validation[1]),
        "prior_precision": posterior.details["prior_precision"],
        "map": trained.details,
        "ivon": ivon.details,
    }


def evaluate(predictors: Iterable[Predictor], test: Pair) -> list[Measured]:
    found = []
    for predictor in predictors:
        log_probs = predictor(test[0].split(500))
        found.append(Measured(**vars(score(predictor.label, log_probs, test[1])), ece_floor=ece_floor(log_probs.exp())))
    return found


# -- what is stored


def rows(scores: Sequence[Measured]) -> list[dict[str, Any]]:
    """Scores, and whether each is among the best of its posterior: with the plain model, as what LA starts from."""
    stored = [s.as_dict() | {"key": key(s.label), "ece_floor": s.ece_floor} for s in scores]
    for name in {s.label.posterior or "LA" for s in scores}:
        mine = [i for i, s in enumerate(scores) if (s.label.posterior or "LA") == name]
        flags = {
            "best_nlpd": bold([scores[i].losses for i in mine]),
            "best_accuracy": bold([scores[i].hits for i in mine], larger=True),
        }
        for flag, values in flags.items():
            for i, value in zip(mine, values, strict=True):
                stored[i][flag] = value
    return stored


def differences(scores: Sequence[Measured]) -> list[dict[str, Any]]:
    """NLPD of each of ours minus that of each baseline on the same network, with the error of the paired mean."""
    found = []
    for one in (s for s in scores if s.label.method == "ours" and s.label.fitted):
        for other in (s for s in scores if s.label.method != "ours"):
            if one.label.posterior == (other.label.posterior or "LA"):
                gap = one.losses - other.losses
                error = gap.std().item() / len(gap) ** 0.5
                found.append(
                    {"one": key(one.label), "other": key(other.label), "mean": gap.mean().item(), "error": error}
                )
    return found


def key(label: Label) -> str:
    return label.name + ("" if label.fitted or label.method != "ours" else " as it is")


def ece_floor(probs: Tensor, draws: int = 20) -> float:
    """ECE of labels drawn from the predictions themselves: what chance and binning give to a calibrated predictor."""
    labels = torch.multinomial(probs, draws, replacement=True, generator=torch.Generator().manual_seed(0))
    return sum(metrics.ece(probs, y) for y in labels.unbind(1)) / draws


# -- the prior precision


@torch.no_grad()
def sweep_precision(
    trained: Trained, posterior: KroneckerPosterior, factors: Sequence[float], draws: int
) -> list[dict[str, Any]]:
    """NLPD on validation and test images (some of them), for the curvature of `posterior` under other priors."""
    best, found = posterior.details["prior_precision"], []
    parts = {"validation": some(trained.data.validation), "test": some(trained.data.test)}
    for factor in factors:
        changed = with_prior_precision(posterior, factor * best)
        sampler = Sampler(trained.model, changed, draws, seed=0)
        validation = batches(parts["validation"])
        (narrow,) = mlp.glm(trained.model, changed, "LA", validation, fitted=False)
        fitted, as_it_is = mlp.ours(trained.model, changed, "LA", validation, ("probit",), covariance="full")
        ways = {"sampling": sampler.log_probs, "GLM": narrow.log_probs}
        ways |= {"ours": fitted.log_probs, "ours as it is": as_it_is.log_probs}
        entry: dict[str, Any] = {"prior_precision": factor * best, "scale": fitted.label.scale}
        for way, log_probs in ways.items():
            entry[way] = {part: mean_nlpd(log_probs, pair) for part, pair in parts.items()}
        found.append(entry)
    return found


def refined_sweep(trained: Trained, posterior: KroneckerPosterior, mode: Mode) -> list[dict[str, Any]]:
    """A sweep, with steps half as long on both sides of where sampling and GLM are best on validation images."""
    factors, draws, between = SWEEP[mode], SWEEP_DRAWS[mode], set()
    coarse = sweep_precision(trained, posterior, factors, draws)
    for way in ("sampling", "GLM"):
        values = [entry[way]["validation"] for entry in coarse]
        at = values.index(min(values))
        between |= {math.sqrt(factors[at] * factors[other]) for other in (at - 1, at + 1) if 0 <= other < len(factors)}
    fine = sweep_precision(trained, posterior, sorted(between), draws)
    return sorted(coarse + fine, key=lambda entry: entry["prior_precision"])


def tuned_groups(
    trained: Trained, posterior: KroneckerPosterior, validation: Batches, sweep: list[dict[str, Any]], samples: int
) -> Iterable[list[Predictor]]:
    """Each method with the prior precision of least NLPD on validation images."""
    model = trained.model
    chosen = {
        way: min(sweep, key=lambda e: e[way]["validation"])["prior_precision"] for way in ("sampling", "GLM", "ours")
    }
    at = {way: with_prior_precision(posterior, precision) for way, precision in chosen.items()}
    yield [mlp.sampler(model, at["sampling"], "LA", samples, form="prior tuned")]
    yield mlp.glm(model, at["GLM"], "LA", validation, form="prior tuned", fitted=False)
    yield mlp.ours(model, at["ours"], "LA", validation, ("probit", "mean_field"), "prior tuned", covariance="full")[:2]


def some(pair: Pair) -> Pair:
    rows = torch.randperm(len(pair[1]), generator=torch.Generator().manual_seed(0))[:SWEEP_POINTS]
    return pair[0][rows], pair[1][rows]


def mean_nlpd(log_probs: Any, pair: Pair) -> float:
    found = torch.cat([log_probs(x) for x in pair[0].split(500)])
    return -found.gather(1, pair[1][:, None]).double().mean().item()


# -- the report

ROWS = {  # key of a row -> what it is called, the paper's name of it
    "MAP": ("MAP", ""),
    "temperature scaling": ("temperature scaling", ""),
    "LA sampling": ("LA sampling", "LA sampling"),
    "LA sampling prior tuned": ("LA sampling, prior tuned", ""),
    "LA sampling scale fitted": ("LA sampling, scale fitted", ""),
    "LA GLM probit": ("LA GLM", "LA GLM"),
    "LA GLM probit prior tuned": ("LA GLM, prior tuned", ""),
    "LA GLM probit scale fitted": ("LA GLM, scale fitted", ""),
    OURS: ("LA ours", "LA ours"),
    "LA ours probit factored": ("LA ours, the paper's factored form", "LA ours"),
    "LA ours probit prior tuned": ("LA ours, prior tuned", ""),
    "LA ours mean_field exact": ("LA ours, mean-field link", ""),
    "MFVI mean weights": ("MFVI, mean weights alone", ""),
    "MFVI temperature scaling": ("MFVI, temperature scaling", ""),
    "MFVI sampling": ("MFVI sampling", "MFVI sampling"),
    "MFVI sampling scale fitted": ("MFVI sampling, scale fitted", ""),
    "MFVI ours probit": ("MFVI ours", "MFVI ours"),
    "MFVI ours mean_field": ("MFVI ours, mean-field link", ""),
}
CAPTION = (
    "± is the standard error (the paper prints the standard deviation over test images: its ± is left out). Bold: best "
    "of all rows with that posterior, in both tables, or not told apart from it by a paired t-test at 5%. "
    "Sampling and GLM as they are is the paper's protocol; ours always has its scale fitted on validation images. "
    "Prior tuned: the prior precision, too, is chosen on validation images. Grey: the paper, * where it is bold there."
)


def section(records: dict[str, Record]) -> Section:
    known = {name: Rows(records[name]) for name in TITLES if name in records}
    body = "".join(
        _tables(name, rows) + engines.table(TITLES[name], engines.of_set(records, name), rows["MAP"]["nlpd"])
        for name, rows in known.items()
    )
    caption = (
        "NLPD on 2,000 test images for Kronecker posteriors with the same curvature and other prior precisions (100 "
        "draws). The vertical line is the precision of largest marginal likelihood."
    )
    body += html.figure(sweep_plot({TITLES[n]: r for n, r in known.items()}), caption)
    both = [line for name in known for line in engines.reading(TITLES[name], engines.of_set(records, name))]
    by_title = {TITLES[name]: engines.of_set(records, name) for name in known}
    return Section(body, [*both, *readings(records)], engines.headline(by_title))


def _tables(name: str, rows: Rows) -> str:
    head = ["", "ACC", "NLPD", "ECE", "scale"]
    main = [_line(rows[k], title, name, paper) for k, (title, paper) in ROWS.items() if k in rows]
    rest = [_line(row, row["key"].replace("_", "-"), name, "") for row in rows if row["key"] not in ROWS]
    about = (
        f"{TITLES[name]}: {rows.record['points']:,} test and {rows.record['validation_points']:,} validation images. "
    )
    links = (
        "The other links, forms and structures of ours; “as it is” has no fitted scale. The Monte Carlo link's is "
        "fitted on 2,000 validation images, for it is slow."
    )
    return f"<h3>{TITLES[name]}</h3>" + html.table(head, main, about + CAPTION) + html.table(head, rest, links)


def _line(row: Record, title: str, name: str, paper: str) -> html.Line:
    def beside(table: dict[str, dict[str, tuple[float, bool]]]) -> str:
        value, best = table.get(name, {}).get(paper, (None, False))
        return "" if value is None else f"{value:.3f}{'*' if best else ''}"

    cells = [
        title,
        html.Cell(f"{row['accuracy']:.4f} ± {row['accuracy_error']:.4f}", beside(published.ACC), row["best_accuracy"]),
        html.Cell(f"{row['nlpd']:.4f} ± {row['nlpd_error']:.4f}", beside(published.NLPD), row["best_nlpd"]),
        html.Cell(f"{row['ece']:.4f}", beside(published.ECE)),
        "" if row["scale"] is None else f"{row['scale']:.3g}",
    ]
    return html.Line(cells, ours=row["method"] == "ours", start=title in ("LA sampling", "MFVI, mean weights alone"))


def sweep_plot(known: dict[str, Rows]) -> str:
    """NLPD against the prior precision, one panel for each set."""
    ways = {
        "sampling": ("sampling", "-"),
        "GLM": ("linearised", "-"),
        "ours": (plots.OURS, "-"),
        "ours as it is": (plots.OURS, ":"),
    }
    with plots.drawing(3.2 * len(known), 2.9) as (figure, svg):
        axes = figure.subplots(1, len(known), squeeze=False)[0]
        for axis, (title, rows) in zip(axes, known.items(), strict=True):
            sweep = rows.record["sweep"]
            for way, (colour, style) in ways.items():
                values = [entry[way]["test"] for entry in sweep]
                axis.plot([e["prior_precision"] for e in sweep], values, style, color=plots.COLOURS[colour], label=way)
            axis.axvline(rows.record["prior_precision"], color=plots._INK, linewidth=0.8, alpha=0.5)
            axis.set(xscale="log", yscale="log", title=title, xlabel="prior precision")
            axis.grid()
        axes[0].set_ylabel("NLPD")
        axes[-1].legend()
        return svg()


EXPERIMENT = Experiment(
    "mnist",
    "MNIST-like images",
    f"The paper's {published.LABEL}",
    units,
    section,
    needs=("ivon",),
)
