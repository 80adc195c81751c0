"""Rotated MNIST: how predictions of a network trained on upright digits change as the test digits turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets import Images, Pair, batches, path
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.methods import mlp
from experiments.methods.classify import Batches, Link, Predictor, plain, score
from experiments.methods.engines import CALIBRATED, LINEARISED, STREAMLINED, both
from experiments.mnist.mnist import key
from experiments.mnist.networks import IVON, MAP, ivon_network, laplace, map_network
from experiments.published import rotated as published
from experiments.report import html
from propagauss.demo.report import plots
from propagauss.posteriors import KroneckerPosterior

ANGLES = {"full": list(range(0, 181, 10)), "quick": [0, 90, 180]}
POINTS = 2000  # test images, a fixed random choice: sampling takes time
SAMPLES = {"full": 250, "quick": 4}
LINKS: tuple[Link, ...] = ("probit", "mean_field")
CURVES = {  # drawn: key of a curve -> the paper's name of it, or ours; its colour; its style
    "MAP": ("MAP", "MAP", "-"),
    "temperature scaling": ("temperature scaling", "temperature scaling", "-"),
    "LA sampling scale fitted": ("LA sampling", "sampling", "-"),
    "LA GLM probit scale fitted": ("LA GLM", "linearised", "-"),
    "LA ours probit exact": ("LA ours", plots.OURS, "-"),
    "LA linearised mean_field calibrated": ("LA linearised", "linearised", ":"),
    "MFVI sampling scale fitted": ("MFVI sampling", "sampling", "--"),
    "MFVI ours probit": ("MFVI ours", plots.OURS, "--"),
}
PAPER = {"LA GLM probit": "LA GLM", "LA ours probit exact": "LA ours", "MFVI ours probit": "MFVI ours"}


def units(context: Context) -> list[Unit]:
    path(context, "images", "mnist.npz")
    shared = {"angles": ANGLES[context.mode], "points": POINTS, "samples": SAMPLES[context.mode]}
    return [
        Unit("la", shared | {"map": MAP}, laplace_curves),
        Unit("mfvi", shared | {"ivon": IVON}, mean_field_curves),
        Unit("engines", shared | {"map": MAP, "ivon": IVON}, engine_curves),
    ]


def laplace_curves(context: Context) -> dict[str, Any]:
    trained, posterior = map_network(context, "mnist"), laplace(context, "mnist", "kronecker")
    assert isinstance(posterior, KroneckerPosterior)
    validation = batches(trained.data.validation)
    groups = mlp.laplace_groups(trained.model, posterior, validation, SAMPLES[context.mode], LINKS)
    return curves(groups, turned(trained.data, ANGLES[context.mode]), ANGLES[context.mode])


def mean_field_curves(context: Context) -> dict[str, Any]:
    trained, posterior = ivon_network(context, "mnist")
    validation = batches(trained.data.validation)
    groups = mlp.mfvi_groups(trained.model, posterior, validation, SAMPLES[context.mode], LINKS)
    return curves(groups, turned(trained.data, ANGLES[context.mode]), ANGLES[context.mode])


def engine_curves(context: Context) -> dict[str, Any]:
    """Both engines on both posteriors: as they are, with fitted scales, calibrated."""
    trained, posterior = map_network(context, "mnist"), laplace(context, "mnist", "kronecker")
    validation, angles = batches(trained.data.validation), ANGLES[context.mode]
    pairs = turned(trained.data, angles)
    found = curves(both(trained.model, posterior, "LA", validation, covariance="full"), pairs, angles)
    base = {"LA": _scaled(trained.model, validation, pairs, angles)}
    trained, posterior = ivon_network(context, "mnist")
    more = curves(both(trained.model, posterior, "MFVI", validation), pairs, angles)
    base["MFVI"] = _scaled(trained.model, validation, pairs, angles)
    return found | {"curves": found["curves"] | more["curves"], "base": base}


def _scaled(model: nn.Module, validation: Batches, pairs: Sequence[Pair], angles: Sequence[int]) -> list[float]:
    """NLPD of the very network with a temperature."""
    found = curves(iter([plain(model, validation)[1:]]), pairs, angles)
    return found["curves"]["temperature scaling"]["nlpd"]


def curves(groups: Iterator[list[Predictor]], turned: Sequence[Pair], angles: Sequence[int]) -> dict[str, Any]:
    """NLPD, accuracy and mean entropy of each predictor at each angle."""
    found: dict[str, Any] = {}
    for group in groups:
        for predictor in group:
            scores = [score(predictor.label, predictor(x.split(500)), y) for x, y in turned]
            found[key(predictor.label)] = {
                "nlpd": [s.nlpd for s in scores],
                "nlpd_error": [s.nlpd_error for s in scores],
                "accuracy": [s.accuracy for s in scores],
                "entropy": [s.entropy.mean().item() for s in scores],
                "scale": predictor.label.scale,
            }
    return {"angles": list(angles), "points": len(turned[0][1]), "curves": found}


def turned(data: Images, angles: Iterable[int]) -> list[Pair]:
    """Some test images, rotated; what comes in at the corners is background."""
    x, y = data.test
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:POINTS]
    side, background = math.isqrt(x.shape[1]), data.train[0].min()
    upright = x[rows].reshape(-1, 1, side, side) - background
    return [((rotate(upright, angle) + background).flatten(1), y[rows]) for angle in angles]


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Images `[N, 1, H, W]` about their centre, counter-clockwise, bilinear, zero outside."""
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(x), 2, 3)
    return F.grid_sample(x, F.affine_grid(matrix, list(x.shape), align_corners=False), align_corners=False)


# -- the report


def section(records: dict[str, Record]) -> Section:
    first = next(iter(records.values()))
    found = {name: curve for record in records.values() for name, curve in record["curves"].items()}
    about = (
        f"A fixed random choice of {first['points']:,} test images; scales fitted on upright validation images. Thick: "
        "here; thin: the paper's curves, where sampling and GLM are used as they are, without a fitted scale. Solid: "
        "MAP and LA; dashed: MFVI; dotted curve: LA linearised and calibrated, on a network that may have been trained "
        "again. Dotted line: the NLPD of not knowing, log 10."
    )
    body = html.figure(plot(found, first["angles"], "nlpd", "NLPD", published.NLPD), f"NLPD. {about}")
    body += html.figure(plot(found, first["angles"], "accuracy", "ACC", published.ACC), f"ACC. {about}")
    engines = _engines(found, records.get("engines", {}).get("base"), first["angles"])
    return Section(body + _table(found, first["angles"]), [*engines, *readings(found, first["angles"])])


def plot(
    found: Mapping[str, Any], angles: Sequence[int], metric: str, label: str, paper: Mapping[str, Sequence[float]]
) -> str:
    with plots.drawing(7.2, 3.6) as (figure, svg):
        axis = figure.subplots()
        for name, (short, colour, style) in CURVES.items():
            if name not in found:
                continue
            look: dict[str, Any] = {"color": plots.COLOURS[colour], "linestyle": style}
            axis.plot(angles, found[name][metric], linewidth=1.9, label=name.replace(" probit", ""), **look)
            if short in paper:
                axis.plot(range(0, 181, 10), paper[short], linewidth=0.7, alpha=0.75, **look)
        if metric == "nlpd":
            axis.axhline(math.log(10), color=plots._INK, linestyle=":", linewidth=0.8)
        axis.set(xlabel="rotation, degrees", ylabel=label, xlim=(0, 180), xticks=range(0, 181, 30))
        axis.grid(axis="y")
        figure.legend(loc="outside right upper")
        return svg()


def readings(found: Mapping[str, Any], angles: Sequence[int]) -> list[str]:
    """The paper's claims about the figure, with its numbers and ours."""
    lines = []
    for posterior, ours, others in (
        (
            "LA",
            "LA ours probit exact",
            ("MAP", "temperature scaling", "LA sampling scale fitted", "LA GLM probit scale fitted"),
        ),
        ("MFVI", "MFVI ours probit", ("MFVI mean weights", "MFVI temperature scaling", "MFVI sampling scale fitted")),
    ):
        if ours not in found:
            continue
        mine, words = found[ours]["nlpd"], []
        for other in others:
            theirs = found[other]["nlpd"]
            lower = sum(a < b for a, b in zip(mine, theirs, strict=True))
            gap = sum(a - b for a, b in zip(mine, theirs, strict=True)) / len(angles)
            words.append(f"{other.replace(' probit', '')} at {lower} of {len(angles)} angles (on average {gap:+.2f})")
        lines.append(f"{posterior}: the NLPD of ours is below that of {', '.join(words)}.")
        paper = published.NLPD[f"{posterior} ours"]
        against = [n for n in ("MAP", f"{posterior} sampling", f"{posterior} GLM") if n in published.NLPD]
        counts = [f"{n} at {sum(a < b for a, b in zip(paper, published.NLPD[n], strict=True))} of 19" for n in against]
        lines.append(f"{posterior} in the paper: ours is below {', '.join(counts)} angles.")
    lines += [_both(found), _accuracies(found), _confidence(found, angles)]
    return [line for line in lines if line]


def _engines(found: Mapping[str, Any], base: Mapping[str, Any] | None, angles: Sequence[int]) -> list[str]:
    """Both engines, calibrated, against temperature scaling of the same network."""
    if base is None:
        return ["Both engines, calibrated: not run."]
    lines = []
    for posterior, theirs in base.items():
        told = []
        for name in (f"{posterior} {STREAMLINED} probit", f"{posterior} {LINEARISED} mean_field"):
            gaps = [a - b for a, b in zip(found[f"{name} {CALIBRATED}"]["nlpd"], theirs, strict=True)]
            told.append(
                f"{name.split()[1]} {gaps[0]:+.3f} upright, {statistics.fmean(gaps):+.2f} on average over "
                f"{len(angles)} angles, {min(gaps):+.2f} at best"
            )
        lines.append(
            f"{posterior}, calibrated on upright images, NLPD minus that of temperature scaling of the same network: "
            f"{'; '.join(told)}."
        )
    return lines


def _both(found: Mapping[str, Any]) -> str:
    if not {"LA ours probit exact", "MFVI ours probit"} <= found.keys():
        return ""
    pairs = list(zip(found["LA ours probit exact"]["nlpd"], found["MFVI ours probit"]["nlpd"], strict=True))
    paper = list(zip(published.NLPD["LA ours"], published.NLPD["MFVI ours"], strict=True))
    return (
        f"Ours with LA and with MFVI differ by at most {max(abs(a - b) for a, b in pairs):.2f} in NLPD (paper: "
        f"{max(abs(a - b) for a, b in paper):.2f}); the largest values are {max(a for a, _ in pairs):.2f} and "
        f"{max(b for _, b in pairs):.2f} (paper: {max(a for a, _ in paper):.2f} and {max(b for _, b in paper):.2f})."
    )


def _accuracies(found: Mapping[str, Any]) -> str:
    shown = [found[name]["accuracy"] for name in CURVES if name in found]
    most = max(max(at) - min(at) for at in zip(*shown, strict=True))
    paper = max(max(at) - min(at) for at in zip(*published.ACC.values(), strict=True))
    return f"Accuracies of the methods drawn differ by at most {most:.3f} at any angle (paper: {paper:.3f})."


def _confidence(found: Mapping[str, Any], angles: Sequence[int]) -> str:
    """Low NLPD far from the data may only be low confidence everywhere: say which curves paid for it upright."""
    plain = (name for name in found if (name.endswith("as it is") and "ours" in name) or name in _AS_THEY_ARE)
    worst = {name: max(found[name]["nlpd"]) for name in plain}
    parts = [
        f"{name.replace(' probit', '')} {found[name]['nlpd'][0]:.2f} upright, {worst[name]:.2f} at worst"
        for name in worst
    ]
    return (
        f"Not knowing at all has NLPD {math.log(10):.2f}, so wide posteriors look good far from the data and pay for "
        f"it near them. Without a fitted scale: {'; '.join(parts)}."
    )


_OURS = ("ours", STREAMLINED, LINEARISED)
_AS_THEY_ARE = ("LA sampling", "LA GLM probit", "MFVI sampling")


def _table(found: Mapping[str, Any], angles: Sequence[int]) -> str:
    shown = [a for a in (0, 30, 60, 90, 120, 150, 180) if a in angles]
    lines = []
    for name, curve in found.items():
        cells: list[html.Cell | str] = [name.replace("_", "-")]
        for angle in shown:
            paper = published.NLPD.get(PAPER.get(name, name))
            at = angles.index(angle)
            cells.append(html.Cell(f"{curve['nlpd'][at]:.3f}", f"{paper[angle // 10]:.3f}" if paper else ""))
        lines.append(
            html.Line(
                [*cells, f"{sum(curve['accuracy']) / len(angles):.3f}"], ours=any(f" {w} " in name for w in _OURS)
            )
        )
    head = ["NLPD at", *(f"{a}°" for a in shown), "mean ACC"]
    return html.table(
        head, lines, "All ways to predict. “As it is”, and sampling and GLM without more: no fitted scale."
    )


EXPERIMENT = Experiment("rotated", "Rotated MNIST", f"The paper's {published.LABEL}", units, section, needs=("ivon",))
