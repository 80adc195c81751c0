"""How linear the MNIST network is around its inputs, and how far linearisation is from true moments in each layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.datasets import batches
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.mnist.networks import IVON, MAP, ivon_network, laplace, map_network
from experiments.published import linearity as published
from experiments.report import html
from propagauss.demo.report.plots import drawing
from propagauss.engines.streamline import streamline
from propagauss.posteriors import Posterior
from propagauss.predictive.classifier import Classifier
from propagauss.tasks import linearity

POINTS = 124  # as in the paper
SAMPLES = {"full": 1000, "quick": 10}


def units(context: Context) -> list[Unit]:
    config: dict[str, Any] = {"map": MAP, "points": POINTS, "epsilons": linearity.EPSILONS}
    layers = {"map": MAP, "ivon": IVON, "points": POINTS, "samples": SAMPLES[context.mode]}
    return [Unit("error", config, measure_error), Unit("layers", layers, measure_layers)]


def measure_error(context: Context) -> Record:
    network = map_network(context, "mnist")
    x = some(network.data.validation[0], context.seed)
    exact = copy.deepcopy(network.model).double()
    found = {
        "δ_Lin": linearity.error(network.model, x),
        "δ_Lin, double precision": linearity.error(exact, x.double()),
        "bending": linearity.error(exact, x.double(), affine=True),
    }
    one = found["δ_Lin"]
    return {
        "epsilons": one.epsilon.tolist(),
        "relative": {name: e.relative.double().tolist() for name, e in found.items()},
        "by_sign": {
            name: {sign: (getattr(e, sign) / e.output_range).double().mean(1).tolist() for sign in ("plus", "minus")}
            for name, e in found.items()
        },
        "input_range": one.input_range,
        "output_range": one.output_range.tolist(),
    }


def measure_layers(context: Context) -> Record:
    """Each activation under the posteriors, as they are and with the scale that predicts best."""
    found = []
    network, posterior = map_network(context, "mnist"), laplace(context, "mnist", "kronecker")
    mean, mean_field = ivon_network(context, "mnist")
    x = some(network.data.validation[0], context.seed)
    validation = batches(network.data.validation)
    cases: list[tuple[str, Any, Posterior, Literal["diagonal", "full"]]] = [
        ("LA", network.model, posterior, "full"),
        ("MFVI", mean.model, mean_field, "diagonal"),
        ("MFVI with covariances", mean.model, mean_field, "full"),
    ]
    for name, model, chosen, structure in cases:
        net = streamline(model, chosen, x[:2], covariance=structure)
        scale = Classifier(net).fit_scale(validation, progress=False).scale
        for factor in (1.0, scale):
            scaled = chosen.scale(factor)
            net = streamline(model, scaled, x[:2], covariance=structure)
            report = linearity.layers(net, x)
            check = linearity.against_samples(net, model, scaled, x, samples=SAMPLES[context.mode], seed=context.seed)
            rows = {"layers": [asdict(layer) for layer in report], "whole": asdict(check)}
            found.append({"posterior": name, "scale": factor, "fitted": factor is scale} | rows)
    return {"posteriors": found}


def some(x: Tensor, seed: int) -> Tensor:
    """A random choice, always the same."""
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:POINTS]]


# -- the report


def section(records: dict[str, Record]) -> Section:
    body, lines = "", []
    if "error" in records:
        record = records["error"]
        body += html.figure(
            _curves(record),
            f"The paper's error δ_Lin ({published.LABEL}) for each output, relative to its range: ours (blue), the "
            "paper's (grey); and the part of it that is bending (orange): the error of the tangent instead of the ray.",
        )
        body += _error_table(record)
        lines += error_readings(record)
    if "layers" in records:
        body += _layer_table(records["layers"])
        lines += layer_readings(records["layers"])
    return Section(body, lines)


def error_readings(record: Record) -> list[str]:
    ours, theirs = record["relative"]["δ_Lin"], published.ERROR
    at = record["epsilons"].index(0.1)
    slope = _slope(record["epsilons"], record["relative"]["δ_Lin, double precision"])
    bend = record["relative"]["bending"]
    low, high = min(record["output_range"]), max(record["output_range"])
    share = _mean(bend[at]) / max(_mean(record["relative"]["δ_Lin, double precision"][at]), 1e-300)
    return [
        f"At ε = 0.1 the error is {_mean(ours[at]):.1e} of the range of an output on average (largest output "
        f"{max(ours[at]):.1e}); the paper has {_mean(theirs[0.1]):.1e} ({max(theirs[0.1]):.1e}). Inputs range over "
        f"{record['input_range']:.3f} (paper {published.INPUT_RANGE}), outputs over {low:.0f} to {high:.0f} (paper "
        f"{published.OUTPUT_RANGE[0]:.0f} to {published.OUTPUT_RANGE[1]:.0f}).",
        f"Between ε = 1e-5 and 0.1 the error grows as ε to the power {slope:.2f} (double precision): that is the "
        f"offset which biases give an affine function, and not a bend. Measured against the tangent, {share:.1%} of it "
        f"remain at ε = 0.1. Below ε = 1e-4 single precision is all that the paper's curve, and ours, shows.",
    ]


def layer_readings(record: Record) -> list[str]:
    found = []
    for p in record["posteriors"]:
        worst = max(p["layers"], key=lambda layer: layer["variance_error"])
        how = f"scale fitted, {p['scale']:.2g}" if p["fitted"] else "as it is"
        whole = p["whole"]
        found.append(
            f"{p['posterior']} ({how}): at the worst activation (module {worst['path']}) linearised variances are off "
            f"by {worst['variance_error']:.0%} of the true ones in sum, their total is {worst['variance_ratio']:.2f} "
            f"times the true one, and means are off by {worst['mean_error']:.2f} standard deviations. Over the whole "
            f"net the variance is {whole['variance_ratio']:.2f} times that of {whole['samples']} weight samples, the "
            f"mean off by {whole['mean_error']:.2f} standard deviations ({whole['samples'] ** -0.5:.2f} by chance)."
        )
    return found


def _slope(epsilons: Sequence[float], errors: Sequence[Sequence[float]]) -> float:
    low, high = epsilons.index(1e-5), epsilons.index(0.1)
    return math.log(_mean(errors[high]) / max(_mean(errors[low]), 1e-300)) / math.log(epsilons[high] / epsilons[low])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _curves(record: Record) -> str:
    with drawing(5.4, 3.2) as (figure, svg):
        axis = figure.subplots()
        theirs = list(published.ERROR.values())
        groups = (
            (list(published.ERROR), theirs, "#8a8f98", "paper"),
            (record["epsilons"], record["relative"]["δ_Lin"], "#2f7fd1", "ours"),
            (record["epsilons"], record["relative"]["bending"], "#e08e0b", "ours, bending only"),
        )
        for epsilons, errors, colour, label in groups:
            lines = axis.plot(epsilons, [[max(e, 1e-17) for e in row] for row in errors], color=colour, linewidth=0.9)
            lines[0].set_label(label)
        axis.set(xscale="log", yscale="log", xlabel="ε", ylabel="error relative to the range", ylim=(1e-12, None))
        axis.grid()
        axis.legend(loc="lower right")
        return svg()


def _error_table(record: Record) -> str:
    head = ["ε", "δ_Lin, mean", "largest output", "in double precision", "bending only", "1 + ε", "1 - ε"]
    lines = []
    for k, epsilon in enumerate(record["epsilons"]):
        ours, theirs = record["relative"]["δ_Lin"][k], published.ERROR[epsilon]
        cells: list[Any] = [f"{epsilon:g}", html.Cell(f"{_mean(ours):.1e}", f"{_mean(theirs):.1e}")]
        cells.append(html.Cell(f"{max(ours):.1e}", f"{max(theirs):.1e}"))
        cells += [f"{_mean(record['relative'][n][k]):.1e}" for n in ("δ_Lin, double precision", "bending")]
        cells += [f"{record['by_sign']['δ_Lin'][sign][k]:.1e}" for sign in ("plus", "minus")]
        lines.append(html.Line(cells))
    caption = "Mean over the ten outputs, each relative to its range; the larger of both signs, then each sign."
    return html.table(head, lines, caption)


def _layer_table(record: Record) -> str:
    head = ["posterior", "scale", "module", "input stddev", "mean error", "variance ratio", "variance error"]
    lines = []
    for p in record["posteriors"]:
        for k, layer in enumerate(p["layers"]):
            cells = [p["posterior"], f"{p['scale']:.2g}", f"{layer['path']} {layer['op']}"]
            cells += [f"{layer[n]:.3f}" for n in ("input_stddev", "mean_error", "variance_ratio", "variance_error")]
            lines.append(html.Line(cells, start=k == 0))
        whole = p["whole"]
        cells = [p["posterior"], f"{p['scale']:.2g}", f"whole net, {whole['samples']} samples", ""]
        lines.append(
            html.Line([*cells, *(f"{whole[n]:.3f}" for n in ("mean_error", "variance_ratio", "variance_error"))])
        )
    caption = (
        "Linearised against true moments of each activation, at the Gaussians that reach it "
        "(pg.tasks.linearity.layers). Mean error in standard deviations; variance ratio: linearised over true, summed; "
        f"variance error: sum of absolute differences over the sum of true ones. {POINTS} "
        "validation images. The paper has no such table."
    )
    return html.table(head, lines, caption)


EXPERIMENT = Experiment("linearity", "Local linearity", f"Figure {published.LABEL}", units, section, needs=("ivon",))
