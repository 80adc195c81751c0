"""The products `a_i W_ki` of the MNIST network for the largest weights: their distribution against our Gaussian.

Nothing is approximated on the sampling side: given the input of a layer its pre-activations are Gaussian, so the first
hidden layer is drawn from its exact joint Gaussian, each unit of the second from its own given the first, and weights
from theirs. Layers are independent under these posteriors, so `a_i` and `W_ki` are (the paper's assumption A2 holds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.datasets import batches
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.mnist.networks import IVON, MAP, ivon_network, laplace, map_network
from experiments.report import html
from propagauss.demo.report.plots import drawing
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.posteriors import Posterior
from propagauss.predictive.classifier import Classifier

DRAWS = {"full": 100_000, "quick": 1_000}
WEIGHTS, SHOWN = {"full": 20, "quick": 5}, 5  # of each layer, the largest; how many are drawn
IMAGES = {"full": 20, "quick": 4}  # for each weight
BINS, CLOSE = 60, 0.1
QUANTILES = {"median": 0.5, "high": 0.9}
LAYERS = (2, 4)  # of the Sequential: those with random inputs


@dataclass(frozen=True)
class Case:
    """A network with a posterior, and how its covariances are kept."""

    name: str
    model: nn.Sequential
    posterior: Posterior
    structure: Any
    scale: float


def units(context: Context) -> list[Unit]:
    counts = {"draws": DRAWS[context.mode], "weights": WEIGHTS[context.mode], "images": IMAGES[context.mode]}
    return [
        Unit("LA", {"map": MAP} | counts, lambda context: measure(context, "LA")),
        Unit("MFVI", {"ivon": IVON} | counts, lambda context: measure(context, "MFVI")),
    ]


@torch.no_grad()
def measure(context: Context, kind: str) -> Record:
    with torch.enable_grad():  # the network may have to be trained first
        if kind == "LA":
            network, posterior = map_network(context, "mnist"), laplace(context, "mnist", "kronecker")
        else:
            network, posterior = ivon_network(context, "mnist")
    structure = "full" if kind == "LA" else "diagonal"
    net = streamline(network.model, posterior, network.data.test[0][:2], covariance=structure)
    scale = Classifier(net).fit_scale(batches(network.data.validation), progress=False).scale
    x = network.data.test[0][: IMAGES[context.mode]]
    found = []
    for factor in (1.0, scale):
        case = Case(kind, network.model, posterior.scale(factor), structure, factor)
        for layer in LAYERS:
            found.append(measure_layer(context, case, layer, x) | {"scale": factor, "fitted": factor is scale})
    return {"kind": kind, "layers": found}


def measure_layer(context: Context, case: Case, layer: int, x: Tensor) -> dict[str, Any]:
    """Products of the largest weights of a layer with their inputs, over some images; and histograms of a few."""
    weight, variance = (
        case.model[layer].weight,
        case.posterior.bind(_parameters(case.model)).variance(f"{layer}.weight"),
    )
    assert isinstance(weight, Tensor)
    largest = weight.abs().flatten().topk(WEIGHTS[context.mode]).indices.tolist()
    inputs = activations(case, layer, x)
    generator = torch.Generator().manual_seed(context.seed)
    numbers, shown, dead = [], [], 0
    for n in range(len(x)):
        drawn = draw_activations(case, layer, x[n], DRAWS[context.mode], generator)
        for place, index in enumerate(largest):
            k, i = divmod(index, weight.shape[1])
            if inputs.mean[n, i] <= 0:
                dead += 1
                continue
            w, v = weight[k, i].item(), variance.reshape(weight.shape)[k, i].item()
            product = drawn[:, i] * (w + math.sqrt(v) * torch.randn(len(drawn), generator=generator))
            mean, second = analytic(inputs.mean[n, i].item(), inputs.variance[n, i].item(), w, v)
            numbers.append(compare(product.double(), mean, second))
            if len(shown) < SHOWN and place not in {s["place"] for s in shown}:
                shown.append({"place": place, "weight": f"W[{k}, {i}]"} | histogram(product.double(), mean, second))
    table = {key: torch.tensor([c[key] for c in numbers], dtype=torch.float64) for key in numbers[0]} if numbers else {}
    middle = {key: {q: v.quantile(p).item() for q, p in QUANTILES.items()} for key, v in table.items()}
    return {
        "layer": layer,
        "pairs": len(numbers),
        "off": dead / (len(x) * len(largest)),
        "numbers": middle,
        "shown": sorted(shown, key=lambda s: s["place"]),
    }


def activations(case: Case, layer: int, x: Tensor) -> Gaussian:
    """Our Gaussian over the input of a layer."""
    before = case.model[:layer]
    names = [n for n in case.posterior.names if int(n.split(".")[0]) < layer]
    return streamline(before, case.posterior.select(*names), x[:2], covariance=case.structure)(x)


def draw_activations(case: Case, layer: int, x: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Draws of the input of a layer, marginally for each unit: `[draws, units]`."""
    bound = case.posterior.bind(_parameters(case.model))
    first: Any = case.model[0]
    noise = bound.noise("0.weight", "0.bias").for_covariance(random_input=False)
    joint = Gaussian.full(first(x)[None], noise.covariance(x[None], x[None], None))
    hidden = joint.sample((draws,), generator)[:, 0].relu()
    if layer == 2:
        return hidden
    second: Any = case.model[2]
    stddev = bound.noise("2.weight", "2.bias").variance(hidden).clamp(min=0).sqrt()
    return (second(hidden) + stddev * torch.randn(stddev.shape, generator=generator)).relu()


def analytic(mean: float, variance: float, weight: float, weight_variance: float) -> tuple[float, float]:
    """Mean and variance of the product of independent `a` and `W`, as the linear rule has them."""
    return mean * weight, variance * (weight_variance + weight**2) + weight_variance * mean**2


def compare(product: Tensor, mean: float, variance: float) -> dict[str, float]:
    """Draws against `N(mean, variance)`."""
    centred = product - product.mean()
    true = centred.square().mean().item()
    return {
        "skewness": abs((centred**3).mean().item()) / true**1.5 if true > 0 else 0.0,
        "mean_error": abs(mean - product.mean().item()) / math.sqrt(true) if true > 0 else 0.0,
        "variance_ratio": variance / true if true > 0 else 1.0,
        "total_variation": total_variation(product, mean, variance),
    }


def total_variation(product: Tensor, mean: float, variance: float) -> float:
    """Half the sum of differences over the bins of a histogram; what lies beyond its ends counts as two more bins."""
    edges = _edges(product, mean, variance)
    ours = torch.special.ndtr((edges - mean) / math.sqrt(max(variance, 1e-300))).diff()
    theirs = torch.histogram(product, edges).hist / len(product)
    beyond = abs((1 - ours.sum()) - (1 - theirs.sum())).item()
    return 0.5 * ((ours - theirs).abs().sum().item() + beyond)


def histogram(product: Tensor, mean: float, variance: float) -> dict[str, Any]:
    edges = _edges(product, mean, variance)
    density = torch.histogram(product, edges, density=True).hist
    return {
        "low": edges[0].item(),
        "high": edges[-1].item(),
        "density": " ".join(f"{d:.4g}" for d in density.tolist()),
        "mean": mean,
        "variance": variance,
    }


def _edges(product: Tensor, mean: float, variance: float) -> Tensor:
    sure = 4 * math.sqrt(max(variance, 1e-12))
    low = min(mean - sure, product.quantile(0.001).item())
    high = max(mean + sure, product.quantile(0.999).item())
    return torch.linspace(low, high, BINS + 1, dtype=torch.float64)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


# -- the report


def section(records: dict[str, Record]) -> Section:
    body, lines = "", []
    for record in records.values():
        for part in record["layers"]:
            where = _where(record, part)
            if part["shown"]:
                body += html.figure(_histograms(part["shown"]), f"{where}: draws (blue) and our Gaussian (red).")
            lines.append(_reading(where, part))
    return Section(body + _table(records), [*_verdict(records), *lines])


def _verdict(records: dict[str, Record]) -> list[str]:
    """The paper finds that the Gaussian works well but cannot be skewed."""
    groups: dict[bool, list[str]] = {True: [], False: []}
    for record in records.values():
        for part in record["layers"]:
            if part["numbers"]:
                groups[part["numbers"]["total_variation"]["median"] < CLOSE].append(_where(record, part))
    words = [
        f"{'so it is' if close else 'it is not'} for {', '.join(names)}" for close, names in groups.items() if names
    ]
    close = f"close, but for skewness (here: total variation below {CLOSE})"
    return [f"The paper finds the Gaussian {close}: {'; '.join(words)}."]


def _where(record: Record, part: Record) -> str:
    how = f"scale fitted, {part['scale']:.2g}" if part["fitted"] else "as it is"
    return f"{record['kind']} ({how}), layer {LAYERS.index(part['layer']) + 2}"


def _reading(where: str, part: Record) -> str:
    numbers = part["numbers"]
    if not numbers:
        return f"{where}: no unit behind these weights is on."
    skewed = "skewness that a Gaussian cannot have" if numbers["skewness"]["median"] > 0.2 else "hardly any skewness"
    return (
        f"{where}: over {part['pairs']} pairs of weight and image the total variation distance is "
        f"{numbers['total_variation']['median']:.2f} in the median ({numbers['total_variation']['high']:.2f} at the "
        f"90% quantile), with {skewed} ({numbers['skewness']['median']:.2f}); our variance is "
        f"{numbers['variance_ratio']['median']:.2f} times the true one. In {part['off']:.0%} of all pairs the unit is "
        f"off at the mean and we have no variance at all."
    )


def _histograms(shown: Sequence[Record]) -> str:
    with drawing(1.9 * len(shown) + 0.2, 2.1) as (figure, svg):
        axes = figure.subplots(1, len(shown), squeeze=False)[0]
        for axis, panel in zip(axes, shown, strict=True):
            points = torch.linspace(panel["low"], panel["high"], BINS + 1, dtype=torch.float64)
            density = [float(d) for d in panel["density"].split()]
            axis.stairs(density, points.numpy(), fill=True, color="#2f7fd1", alpha=0.35)
            fine = torch.linspace(panel["low"], panel["high"], 200, dtype=torch.float64)
            gauss = torch.exp(-0.5 * (fine - panel["mean"]).square() / panel["variance"])
            gauss = gauss / math.sqrt(2 * math.pi * panel["variance"])
            axis.plot(fine.numpy(), gauss.numpy(), color="#d1493f", linewidth=1.2, linestyle="--")
            top = max(sorted(density)[-2], gauss.max().item())  # a ReLU that is off piles up in one bin
            axis.set(title=panel["weight"], yticks=[], ylim=(0, 1.15 * top))
        figure.supxlabel("a_i W_ki", fontsize=9)
        return svg()


def _table(records: dict[str, Record]) -> str:
    keys = {"total_variation": "total variation", "skewness": "|skewness|", "mean_error": "mean error"}
    keys |= {"variance_ratio": "variance ratio"}
    head = ["posterior", "pairs", *keys.values(), "off"]
    lines = []
    for record in records.values():
        for part in record["layers"]:
            if part["numbers"]:
                cells = [_where(record, part), str(part["pairs"])]
                cells += [f"{part['numbers'][k]['median']:.3f} ({part['numbers'][k]['high']:.3f})" for k in keys]
                lines.append(html.Line([*cells, f"{part['off']:.0%}"]))
    caption = (
        "Medians over pairs of a weight and an image in which the unit is on (in brackets, the 90% quantile): the "
        "largest weights by magnitude of each layer. Mean error in standard deviations; variance ratio: ours over "
        "true. The paper shows five such densities (fig:aw_sample) and no numbers."
    )
    return html.table(head, lines, caption)


EXPERIMENT = Experiment(
    "gaussianity", "Products of activations and weights", "Figure fig:aw_sample", units, section, needs=("ivon",)
)
