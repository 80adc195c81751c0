"""How long a prediction takes, one data point at a time, relative to the plain forward pass on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.methods.draws import Draws
from experiments.published import runtime as published
from experiments.report import html
from experiments.transformers.vit_networks import BLOCKS, ImageClassifier, Prefix, Suffix
from propagauss.demo.timing import Ratio, relative_times
from propagauss.demo.training import mlp
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.posteriors import DiagonalPosterior, Posterior
from propagauss.predictive.baselines import GLM

VARIANCE = 1e-4  # of every random weight; no time depends on it
MLP: dict[str, Any] = {"sizes": [784, 128, 64, 10], "draws": 1000, "measured_draws": 20}
VIT: dict[str, Any] = {"size": 224, "patch": 16, "width": 768, "blocks": 12, "heads": 12}
VIT |= {"draws": 50, "measured_draws": 1}
TINY = VIT | {"size": 32, "width": 32, "blocks": 3, "heads": 4}
TITLES = {"mlp": "tab:runtime, MLP", "vit": "tab:runtime, ViT", "vit-head": "table:wall-clock-last-layer"}
Calls = dict[str, Callable[[], Any]]
LINEARISED = "linearised"
SHARED = "LA sampling, blocks before them run once"


def units(context: Context) -> list[Unit]:
    vit = (TINY if context.quick else VIT) | {"rounds": 2 if context.quick else 7, "engines": 2}
    return [
        Unit("mlp", MLP | {"rounds": 5 if context.quick else 25, "engines": 2}, partial(_run_mlp, context.quick)),
        Unit("vit", vit, partial(_run_vit, vit)),
        Unit("vit-head", vit, partial(_run_head, vit)),
    ]


@torch.no_grad()
def _run_mlp(quick: bool, context: Context) -> Record:
    model = mlp(MLP["sizes"]).eval()
    x = torch.randn(1, MLP["sizes"][0])
    posterior = _posterior(model, "*")
    calls = _calls(model, posterior, x, MLP["measured_draws"])
    return _measured(calls, {"LA sampling": MLP["draws"] / MLP["measured_draws"]}, 5 if quick else 25, context.seed)


@torch.no_grad()
def _run_vit(config: Mapping[str, Any], context: Context) -> Record:
    """Random attention layers in the last two blocks."""
    model, x = _vit(config)
    blocks = [f"vit.vit.layers.{config['blocks'] - 1 - i}.attention.*" for i in range(BLOCKS)]
    posterior = _posterior(model, *blocks)
    prefix, suffix = Prefix(model), Suffix(model).eval()
    tokens = prefix(x)
    calls = _calls(model, posterior, x, config["measured_draws"])
    calls["ours, value covariance"] = partial(streamline(model, posterior, x, attention="covariance"), x)
    few = Draws(suffix, _posterior(suffix, "blocks.*.attention.*"), config["measured_draws"])
    calls |= {"prefix": lambda: prefix(x), SHARED: lambda: few.log_probs([tokens])}
    many = config["draws"] / config["measured_draws"]
    found = _measured(calls, {"LA sampling": many, SHARED: many}, config["rounds"], context.seed)
    before, times = found["times"].pop("prefix"), found["times"]
    times[SHARED] = {key: value + before[key] for key, value in times[SHARED].items()}
    return found


@torch.no_grad()
def _run_head(config: Mapping[str, Any], context: Context) -> Record:
    model, x = _vit(config)
    calls = _calls(model, _posterior(model, "vit.classifier.*"), x, config["measured_draws"])
    many = config["draws"] / config["measured_draws"]
    return _measured(calls, {"LA sampling": many}, config["rounds"], context.seed)


def _calls(model: nn.Module, posterior: Posterior, x: Tensor, draws: int) -> Calls:
    net, glm, few = streamline(model, posterior, x), GLM(model, posterior), Draws(model, posterior, draws)
    exact = linearise(model, posterior, x)
    return {
        "MAP": lambda: model(x),
        "LA sampling": lambda: few.log_probs([x]),
        "LA GLM": lambda: glm(x),
        "ours": lambda: net(x),
        LINEARISED: lambda: exact(x),
    }


def _measured(calls: Calls, factors: Mapping[str, float], rounds: int, seed: int) -> dict[str, Any]:
    """Ratios to MAP; those of fewer draws than meant are multiplied."""
    ratios, seconds = relative_times(calls, "MAP", rounds, seed)
    times = {name: _times(ratio, factors.get(name, 1.0)) for name, ratio in ratios.items()}
    return {"times": times, "map_seconds": seconds, "threads": torch.get_num_threads()}


def _times(ratio: Ratio, factor: float) -> dict[str, float]:
    return {key: factor * value for key, value in asdict(ratio).items()}


def _posterior(model: nn.Module, *patterns: str) -> Posterior:
    parameters = {n: torch.full_like(p, VARIANCE) for n, p in model.named_parameters()}
    return DiagonalPosterior(parameters).select(*patterns)


def _vit(config: Mapping[str, Any]) -> tuple[ImageClassifier, Tensor]:
    """Random weights: no time depends on them."""
    import transformers

    options: dict[str, Any] = {
        "image_size": config["size"],
        "patch_size": config["patch"],
        "hidden_size": config["width"],
        "intermediate_size": 4 * config["width"],
        "num_hidden_layers": config["blocks"],
        "num_attention_heads": config["heads"],
        "num_labels": 10,
    }
    network = transformers.ViTForImageClassification(transformers.ViTConfig(**options))
    return ImageClassifier(network).eval(), torch.rand(1, 3, config["size"], config["size"])


# -- the report


def section(records: dict[str, Record]) -> Section:
    lines, sentences = [], []
    for key in (k for k in TITLES if k in records):
        record, theirs = records[key], published.TABLES[TITLES[key]]
        times = record["times"]
        for i, name in enumerate([*(n for n in theirs if n in times), *(n for n in times if n not in theirs)]):
            t = times[name]
            paper = _text(_published(key, name)) if name in theirs else ""
            quartiles = "" if name == "MAP" else f"{_text(t['low'])} to {_text(t['high'])}"
            cells = [
                _WORDS[key] if i == 0 else "",
                html.Cell(name, number=False),
                html.Cell(_text(t["median"]), paper),
            ]
            lines.append(html.Line([*cells, quartiles], ours=name.startswith(("ours", LINEARISED)), start=i == 0))
        if LINEARISED not in times:
            lines.append(html.Line(["", html.Cell(LINEARISED, number=False), "not run", ""], ours=True))
        sentences.append(_reading(key, record))
    head = ["model", "method", "time / plain forward", "quartiles"]
    return Section(html.table(head, lines, _CAPTION), sentences)


_WORDS = {
    "mlp": "MLP 784-128-64-10",
    "vit": "ViT-base, attention of the last two blocks",
    "vit-head": "ViT-base, last layer",
}
_CAPTION = (
    "One data point at a time, float32, on a CPU; medians of ratios within interleaved rounds. Grey: the paper's "
    "milliseconds on an H100 divided by its own MAP. Sampling is a loop of forward passes, as in the paper (MLP 1,000 "
    "draws, ViT 50), drawing the weights included: a few draws are measured and multiplied. LA GLM is the Jacobian by "
    "automatic differentiation, linearised the same covariance by `pg.linearise`. MFVI has the same cost as LA here, "
    "since both posteriors are diagonal."
)


def _reading(key: str, record: Record) -> str:
    times, theirs = record["times"], published.TABLES[TITLES[key]]
    told = [f"{n} {_text(t['median'])}" + _beside(key, n) for n, t in times.items() if n != "MAP"]
    order = sorted((n for n in times if n in theirs), key=lambda n: times[n]["median"])
    same = order == sorted(order, key=lambda n: theirs[n][0])
    says = "the order is that of the paper" if same else "the order differs from the paper"
    plain = f"{1e3 * record['map_seconds']:.3g} ms, {record['threads']} thread"
    return f"{_WORDS[key]}, in plain forward passes ({plain}): {', '.join(told)}; {says}."


def _beside(key: str, name: str) -> str:
    return f" (paper {_text(_published(key, name))})" if name in published.TABLES[TITLES[key]] else ""


def _text(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2f}"


def _published(key: str, name: str) -> float:
    table = published.TABLES[TITLES[key]]
    return table[name][0] / table["MAP"][0]


EXPERIMENT = Experiment(
    "runtime",
    "Time of a prediction",
    "Tables tab:runtime and table:wall-clock-last-layer",
    units,
    section,
    needs=("transformers",),
)
