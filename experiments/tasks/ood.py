"""Outliers by the entropy of predictions: Fashion-MNIST against MNIST, CIFAR-10 against textures and street numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.datasets import available, batches, images, path, svhn
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.methods import draws
from experiments.methods.classify import Batches
from experiments.methods.engines import CALIBRATED, LINEARISED, STREAMLINED
from experiments.methods.mlp import factored
from experiments.mnist.networks import IVON, MAP, Trained, ivon_network, laplace, map_network
from experiments.published import ood as published
from experiments.report import html
from experiments.tasks import ood_methods as methods
from experiments.transformers import vit
from experiments.transformers.vit_networks import Kind, Part, Prefix, settings, tokens, trained, tuned, tuning
from propagauss.demo.report.plots import drawing
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.posteriors import KroneckerPosterior
from propagauss.tasks.ood import BANDWIDTH
from propagauss.tasks.plots import densities

SAMPLES = {"full": 1000, "quick": 5}
POINTS = {"full": 10_000, "quick": 60}  # of either kind
VIT_POINTS = {"full": 2000, "quick": 20}
PART: Part = "mlp"  # of the ViT's last two blocks, with random weights
KINDS: tuple[Kind, ...] = ("LA", "MFVI")
OUTLIERS = {"dtd10": "textures (dtd10)", "svhn": "street numbers (SVHN)"}
SCORES = {
    "entropy": "entropy",
    "max_probability": "1 - max p",
    "epistemic_variance": "variance",
    "mutual_information": "mutual information",
}


def units(context: Context) -> list[Unit]:
    path(context, "images", "fashion_mnist.npz")
    common = {"samples": SAMPLES[context.mode], "points": POINTS[context.mode], "draws": methods.DRAWS}
    found = [
        Unit("fashion_mnist-mnist-LA", common | {"map": MAP}, partial(run_mlp, kind="LA")),
        Unit("fashion_mnist-mnist-MFVI", common | {"ivon": IVON}, partial(run_mlp, kind="MFVI")),
        Unit("fashion_mnist-mnist-engines", common | {"map": MAP, "ivon": IVON}, run_engines),
    ]
    if not available(context, "images", "cifar10.npz"):
        return found
    config = settings(context) | {"tuning": {k: tuning(context, k) for k in KINDS}}
    config |= vit.drawn(context) | {"points": VIT_POINTS[context.mode], "draws": methods.DRAWS, "part": PART}
    files = {"dtd10": "dtd10_64px.npz", "svhn": "svhn_test_32x32.mat"}
    there = [name for name, file in files.items() if available(context, "images", file)]
    return found + [Unit(f"cifar10-{name}", config, partial(run_vit, name=name)) for name in there]


# -- MLP


def run_mlp(context: Context, kind: str) -> Record:
    network, found = (laplace_scorers if kind == "LA" else mfvi_scorers)(context)
    count = POINTS[context.mode]
    inside, outside = network.data.test[0][:count], as_seen(network, images(context, "mnist").test[0][:count])
    rows = methods.measure(found, inside.split(500), outside.split(500))
    return {"network": "mlp", "kind": kind, "inside": len(inside), "outside": len(outside), "rows": rows}


def run_engines(context: Context) -> Record:
    """Both engines on both posteriors, as they are, with fitted scales and calibrated."""
    network, count = map_network(context, "fashion_mnist"), POINTS[context.mode]
    posterior, validation = laplace(context, "fashion_mnist", "kronecker"), batches(network.data.validation)
    inside, outside = network.data.test[0][:count], as_seen(network, images(context, "mnist").test[0][:count])
    ivon, mean_field = ivon_network(context, "fashion_mnist")

    def scorers() -> Iterator[methods.Scorer]:
        yield from methods.plain_scorers(network.model, validation)
        yield from methods.engine_scorers(network.model, posterior, "LA", validation, covariance="full")
        yield from methods.plain_scorers(ivon.model, validation, "MFVI")
        yield from methods.engine_scorers(ivon.model, mean_field, "MFVI", validation)

    rows = methods.measure(scorers(), inside.split(500), outside.split(500))
    return {"network": "mlp engines", "kind": "both", "inside": len(inside), "outside": len(outside), "rows": rows}


def as_seen(network: Trained, x: Tensor) -> Tensor:
    """Images in [0, 1] as the network's own inputs are: the ends of their range are those of black and white."""
    low, high = network.data.train[0].min(), network.data.train[0].max()
    return low + x.flatten(1) * (high - low)


def laplace_scorers(context: Context) -> tuple[Trained, Iterator[methods.Scorer]]:
    network, posterior = map_network(context, "fashion_mnist"), laplace(context, "fashion_mnist", "kronecker")
    assert isinstance(posterior, KroneckerPosterior)
    model, validation = network.model, batches(network.data.validation)

    def scorers() -> Iterator[methods.Scorer]:
        yield from methods.plain_scorers(model, validation)
        yield from methods.sampling_scorers(model, posterior, "LA", validation, SAMPLES[context.mode])
        exact = linearise(model, posterior, validation[0][0][:2])
        yield from methods.gaussian_scorers(exact, "GLM", "LA", validation, ("probit",))
        for form, chosen in (("exact", posterior), ("factored", factored(posterior))):
            net = streamline(model, chosen, validation[0][0][:2], covariance="full")
            yield from methods.gaussian_scorers(net, "ours", "LA", validation, form=form)
        net = streamline(model, posterior, validation[0][0][:2])
        form = "exact, variances only"
        yield from methods.gaussian_scorers(net, "ours", "LA", validation, methods.FEWER, form)

    return network, scorers()


def mfvi_scorers(context: Context) -> tuple[Trained, Iterator[methods.Scorer]]:
    network, posterior = ivon_network(context, "fashion_mnist")
    model, validation = network.model, batches(network.data.validation)

    def scorers() -> Iterator[methods.Scorer]:
        yield from methods.plain_scorers(model, validation, "MFVI")
        yield from methods.sampling_scorers(model, posterior, "MFVI", validation, SAMPLES[context.mode])
        net = streamline(model, posterior, validation[0][0][:2])
        yield from methods.gaussian_scorers(net, "ours", "MFVI", validation)

    return network, scorers()


# -- ViT


def run_vit(context: Context, name: str) -> Record:
    model, _ = trained(context, "cifar10")
    features, prefix, count = tokens(context, "cifar10"), Prefix(model), VIT_POINTS[context.mode]
    validation = batches(features.validation, 250)
    inside = features.test[0][:count].split(250)
    with torch.no_grad():
        outside = [prefix(x) for x in outliers(context, name)[:count].split(250)]
    fitted: vit.Fitted = {kind: tuned(context, "cifar10", PART, kind) for kind in KINDS}
    rows = methods.measure(vit_scorers(fitted, validation, vit.drawn(context)), inside, outside)
    counts = {"inside": sum(map(len, inside)), "outside": sum(map(len, outside))}
    return {"network": "vit", "kind": name} | counts | {"rows": rows}


def vit_scorers(fitted: vit.Fitted, validation: Batches, samples: dict[str, int]) -> Iterator[methods.Scorer]:
    for kind, (model, posterior) in fitted.items():
        yield from methods.plain_scorers(model, validation, "" if kind == "LA" else kind)
        yield from methods.draw_scorers(draws.sampling(model, posterior, kind, validation, **samples))
        if kind == "LA":
            exact = linearise(model, posterior, validation[0][0][:2])
            yield from methods.gaussian_scorers(exact, "GLM", kind, validation, ("probit",))
        net = streamline(model, posterior, validation[0][0][:2])
        yield from methods.gaussian_scorers(net, "ours", kind, validation)


def outliers(context: Context, name: str) -> Tensor:
    """Images `[N, 3, 32, 32]`."""
    if name == "svhn":
        return svhn(context)[0]
    data = images(context, "dtd10_64px")
    return F.avg_pool2d(torch.cat([part[0] for part in (data.train, data.validation, data.test)]), 2)


# -- the report


def section(records: dict[str, Record]) -> Section:
    body, lines = "", []
    mlp, engines = ([r for r in records.values() if r["network"] == n] for n in ("mlp", "mlp engines"))
    if mlp:
        rows = [row for r in sorted(mlp, key=lambda r: r["kind"]) for row in r["rows"]]
        body += _part("Fashion-MNIST (inside) against MNIST (outside), MLP", rows, mlp[0])
        lines += [*readings("Fashion-MNIST against MNIST", rows), _kernel(rows, "mlp")]
    body += engines_part(engines)
    lines += engines_readings(engines)
    for record in (r for r in records.values() if r["network"] == "vit"):
        where = f"CIFAR-10 against {OUTLIERS[record['kind']]}"
        body += _part(f"{where}, ViT", record["rows"], record)
        lines += [*readings(where, record["rows"]), _separation(where, record["rows"])]
    return Section(body, lines)


def engines_part(found: Sequence[Record]) -> str:
    title = "Both engines: Fashion-MNIST (inside) against MNIST (outside), MLP"
    if not found:
        return html.paragraph(f"{title}: not run.")
    note = "Networks trained with the settings of those above, maybe again: compare rows within a table."
    return "".join(f"<h3>{title}</h3>{html.paragraph(note)}{_table(r['rows'], r)}" for r in found)


def engines_readings(found: Sequence[Record]) -> list[str]:
    """What calibration leaves of the ability to tell outliers: by the entropy, and by the mutual information."""
    lines = []
    for row in (row for record in found for row in record["rows"] if row["form"] == CALIBRATED):
        verdicts = [_compared(base, *value) for base, value in row["above"].items()]
        best, value = max(((s, d["auroc"]) for s, d in row["detection"].items()), key=lambda pair: pair[1])
        lines.append(
            f"Fashion-MNIST against MNIST, {row['posterior']} {row['method']}, calibrated (scale {row['scale']:.2g}): "
            f"AUROC of the entropy {_auroc(row):.3f}, {' and '.join(verdicts)}; best score {SCORES[best]} {value:.3f}."
        )
    return lines


def _separation(where: str, rows: Sequence[Record]) -> str:
    best = max(rows, key=_auroc)
    clear = "so is it here" if _auroc(best) > 0.9 else "not with the small ViT that stands in for it here"
    return (
        f"{where}: with the paper's ViT-base the densities of ours are clearly apart (it uses SVHN); {clear}: the "
        f"highest AUROC of the entropy is {_auroc(best):.3f} ({_title(best)})."
    )


def readings(where: str, rows: Sequence[Record]) -> list[str]:
    """Ours against the plain model and temperature scaling, and against the other methods of the same posterior."""
    found = []
    for kind in ("LA", "MFVI"):
        mine = [r for r in rows if r["method"] == "ours" and r["posterior"] == kind and r["fitted"]]
        chosen = next((r for r in mine if r["link"] == "probit"), None)
        if chosen is None:
            continue
        verdicts = [_compared(base, *value) for base, value in chosen["above"].items()]
        found.append(
            f"{where}, {kind}: AUROC of the entropy, {_listed(rows, kind, None)}; with fitted scales "
            f"{_listed(rows, kind, True)}; as they are {_listed(rows, kind, False)}. Ours with fitted scale is "
            f"{' and '.join(verdicts)}."
        )
        best = max(mine, key=_auroc)
        score, value = max(((s, d["auroc"]) for s, d in chosen["detection"].items()), key=lambda pair: pair[1])
        found.append(
            f"{where}, {kind}: best by entropy is {_title(best)} with {_auroc(best):.3f}; with probit, the best "
            f"score is {SCORES[score]} with {value:.3f}."
        )
    return found


def _listed(rows: Sequence[Record], kind: str, fitted: bool | None) -> str:
    """The plain model and temperature scaling (None), or sampling, GLM and ours with probit, fitted or not."""
    plain = ("MAP", "mean weights", "temperature scaling")
    mine = [r for r in rows if (r["posterior"] or "LA") == kind and r["form"] in ("", "exact")]
    if fitted is None:
        return ", ".join(f"{r['method']} {_auroc(r):.3f}" for r in mine if r["method"] in plain)
    chosen = [r for r in mine if r["method"] not in plain and r["link"] in ("", "probit") and r["fitted"] == fitted]
    return ", ".join(f"{r['method']} {_auroc(r):.3f}" for r in chosen)


def _compared(base: str, gap: float, error: float) -> str:
    word = "above" if gap > 2 * error else "below" if gap < -2 * error else "not told apart from"
    return f"{word} {base} ({gap:+.3f} ± {error:.3f})"


def _kernel(rows: Sequence[Record], network: str) -> str:
    limit = 1 / math.sqrt(2 * math.pi * published.KERNEL_VARIANCE)
    highest = max(max(_numbers(r["density"]["inside"])) for r in rows)
    return (
        f"The paper names a kernel of variance {published.KERNEL_VARIANCE}, whose density cannot exceed {limit:.1f}; "
        f"its axis goes up to {published.HIGHEST[network]}. Curves here have a kernel of {BANDWIDTH} times the "
        f"standard deviation of the entropies, and go up to {highest:.1f}."
    )


def _part(title: str, rows: Sequence[Record], record: Record) -> str:
    figure = published.FIGURES[record["network"]]
    caption = f"Densities of the entropy ({figure}): inside blue, outside red; axis cut off where the paper's ends."
    return (
        f"<h3>{title}</h3>"
        + html.figure(_curves(rows, published.HIGHEST[record["network"]]), caption)
        + _table(rows, record)
    )


def _curves(rows: Sequence[Record], top: float) -> str:
    shown = [r for r in rows if _is_shown(r)]
    panels = {_title(r): _panel(r["density"]) for r in shown}
    with drawing(1.75 * len(panels) + 0.4, 2.2) as (figure, svg):
        densities(panels, "entropy", ("inside", "outside"), figure, top)
        return svg()


def _is_shown(row: Record) -> bool:
    """The paper's panels, and temperature scaling."""
    if row["method"] == "ours":
        return row["link"] == "probit" and row["fitted"] and row["form"] in ("", "exact")
    if row["method"] == "temperature scaling":
        return not row["posterior"]
    return row["method"] in ("MAP", "sampling", "GLM") and not row["fitted"]


def _panel(density: Record) -> Any:
    values = [torch.tensor(_numbers(density[kind])).numpy() for kind in ("inside", "outside")]
    return torch.linspace(density["low"], density["high"], len(values[0])).numpy(), *values


def _numbers(text: str) -> list[float]:
    return [float(t) for t in text.split()]


def _table(rows: Sequence[Record], record: Record) -> str:
    head = ["method", "scale", "AUROC", "AUPR", "FPR95", *list(SCORES.values())[1:], "entropy inside", "outside"]
    lines = []
    for row in rows:
        entropy = row["detection"]["entropy"]
        others = [row["detection"].get(s) for s in list(SCORES)[1:]]
        cells = [_title(row), "" if row["scale"] is None or not row["fitted"] else f"{row['scale']:.2g}"]
        cells += [
            f"{entropy['auroc']:.3f} ± {row['auroc_error']:.3f}",
            f"{entropy['aupr']:.3f}",
            f"{entropy['fpr95']:.3f}",
        ]
        cells += ["" if d is None else f"{d['auroc']:.3f}" for d in others]
        cells += [f"{row['entropy'][k]:.2f}" for k in ("inside", "outside")]
        lines.append(html.Line(cells, ours=row["method"] in _OURS, start=row["method"] in ("MAP", "mean weights")))
    caption = (
        f"{record['inside']:,} inside, {record['outside']:,} outside. AUROC, AUPR and FPR95 (share of inside flagged "
        "when 95% of outside are) by the entropy; the three columns after them are the AUROC by other scores; last, "
        "mean entropies. The paper shows densities only. Scales are fitted on validation images of the inside set."
    )
    return html.table(head, lines, caption)


_OURS = ("ours", STREAMLINED, LINEARISED)


def _title(row: Record) -> str:
    words = [row["posterior"], row["method"], row["link"].replace("_", "-"), row["form"] and f"({row['form']})"]
    name = " ".join(w for w in words if w)
    if row["fitted"] and row["method"] in ("sampling", "GLM"):
        return f"{name}, scale fitted"
    return f"{name}, scale 1" if row["method"] == "ours" and not row["fitted"] else name


def _auroc(row: Record) -> float:
    return row["detection"]["entropy"]["auroc"]


EXPERIMENT = Experiment(
    "ood", "Outliers", "Figures fig:mlp-ood and fig:vit-ood", units, section, needs=("ivon", "transformers")
)
