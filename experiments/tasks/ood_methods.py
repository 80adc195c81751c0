"""Outlier scores of all methods, for any model and posterior; and how well each score tells outliers apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from experiments.methods import engines
from experiments.methods.classify import (
    LINKS,
    SCALE_DRAWS,
    SCALE_POINTS,
    Batches,
    Label,
    Link,
    Predictor,
    Remembered,
    plain,
)
from experiments.methods.draws import Draws
from experiments.methods.mlp import gaussian
from propagauss.demo.methods import Sampler, fit_class_sampler
from propagauss.gaussian import Gaussian
from propagauss.posteriors import Posterior
from propagauss.predictive.classifier import Classifier
from propagauss.tasks import ood

DRAWS = 256  # of the latent, behind the mutual information
POINTS = 160  # of a density curve
FEWER: tuple[Link, ...] = ("probit", "mean_field")


@dataclass(frozen=True)
class Scorer:
    label: Label
    scores: Callable[[Sequence[Tensor]], ood.Scores]  # of all batches


# -- the methods


def plain_scorers(model: nn.Module, validation: Batches, mean_of: str = "") -> list[Scorer]:
    """The model itself, and with a temperature; `mean_of` names the posterior whose mean it is, if not MAP."""
    return [Scorer(_named(p.label, mean_of), _from_probs(p)) for p in plain(model, validation)]


def sampling_scorers(
    model: nn.Module, posterior: Posterior, name: str, validation: Batches, samples: int, seed: int = 0
) -> Iterator[Scorer]:
    """All draws at once for each batch, as it is and with the scale fitted: for small networks."""
    x, y = (torch.cat(part)[:SCALE_POINTS] for part in zip(*validation, strict=True))
    with torch.no_grad():
        scale = fit_class_sampler(Sampler(model, posterior, min(samples, SCALE_DRAWS), seed), x, y).scale
    sampler = Sampler(model, posterior, samples, seed)
    for s in (sampler, sampler.rescaled(scale)):
        yield Scorer(Label("sampling", name, scale=s.scale, fitted=s is not sampler), _from_sampler(s))


def draw_scorers(predictors: Sequence[Predictor]) -> list[Scorer]:
    """The predictors of `draws.sampling`: one draw at a time over all batches."""
    return [Scorer(p.label, _from_draws(p.draws)) for p in predictors]  # type: ignore[attr-defined]


def gaussian_scorers(
    net: Callable[[Tensor], Gaussian],
    method: str,
    name: str,
    validation: Batches,
    links: Sequence[Link] = LINKS,
    form: str = "",
    as_it_is: Sequence[Link] = ("probit",),
) -> list[Scorer]:
    """A net with each of the links: with its scale fitted, and with those of `as_it_is` without."""
    net = Remembered(net)
    predictors = gaussian(net, method, name, validation, links, form, (True,))
    predictors += gaussian(net, method, name, validation, as_it_is, form, (False,))
    return [Scorer(p.label, _from_classifier(_classifier(net, p.label))) for p in predictors]


def engine_scorers(
    model: nn.Module, posterior: Posterior, name: str, validation: Batches, **options: Any
) -> Iterator[Scorer]:
    """Both engines, in all forms of `engines`; `options` are those of `streamline`."""
    for found in engines.classifiers(model, posterior, name, validation, **options):
        yield from (Scorer(label, _from_classifier(classifier)) for label, classifier in found)


def _named(label: Label, mean_of: str) -> Label:
    if not mean_of:
        return label
    return replace(label, method="mean weights" if label.method == "MAP" else label.method, posterior=mean_of)


def _classifier(net: Callable[[Tensor], Gaussian], label: Label) -> Classifier:
    assert label.scale is not None
    return Classifier(net, label.link, label.scale)  # type: ignore[arg-type]


def _from_classifier(classifier: Classifier) -> Callable[[Sequence[Tensor]], ood.Scores]:
    return lambda inputs: ood.Scores.cat([ood.scores(classifier, x, DRAWS) for x in inputs])


def _from_probs(predictor: Predictor) -> Callable[[Sequence[Tensor]], ood.Scores]:
    return lambda inputs: ood.from_probs(predictor(inputs).double().exp())


def _from_sampler(sampler: Sampler) -> Callable[[Sequence[Tensor]], ood.Scores]:
    return lambda inputs: ood.Scores.cat([ood.from_samples(sampler.latents(x)) for x in inputs])


def _from_draws(draws: Draws) -> Callable[[Sequence[Tensor]], ood.Scores]:
    @torch.no_grad()
    def scores(inputs: Sequence[Tensor]) -> ood.Scores:
        parameters = {name: p.detach() for name, p in draws.model.named_parameters()}
        bound, latents = draws.posterior.bind(parameters), []
        for s in range(draws.samples):
            deviations = bound.sample(1, torch.Generator().manual_seed(1_000_003 * draws.seed + s))
            weights = {n: parameters[n] + math.sqrt(draws.scale) * d[0] for n, d in deviations.items()}
            latents.append(torch.cat([functional_call(draws.model, weights, (x,)) for x in inputs]))
        return ood.from_samples(torch.stack(latents))

    return scores


# -- how well they did


@torch.no_grad()
def measure(scorers: Iterator[Scorer] | Sequence[Scorer], inside: Sequence[Tensor], outside: Sequence[Tensor]) -> Any:
    """For each method: detection by each score, mean entropies, densities of the entropy, and differences to others."""
    rows, entropies = [], {}
    for scorer in scorers:
        ours, theirs = scorer.scores(inside), scorer.scores(outside)
        found = {name: d._asdict() for name, d in ood.evaluate_all(ours, theirs).items()}
        name = (
            scorer.label.name if scorer.label.fitted or scorer.label.method != "ours" else f"{scorer.label.name} as is"
        )
        entropies[name] = (ours.entropy, theirs.entropy)
        means = {"inside": ours.entropy.mean().item(), "outside": theirs.entropy.mean().item()}
        kept = {"detection": found, "entropy": means, "density": curve(ours.entropy, theirs.entropy)}
        rows.append(asdict(scorer.label) | {"name": name} | kept)
    for row in rows:
        row["auroc_error"] = difference(entropies[row["name"]])[1]
        row["above"] = {
            base: difference(entropies[row["name"]], entropies[base])
            for base in ("MAP", "temperature scaling", "MFVI mean weights", "MFVI temperature scaling")
            if base in entropies and base != row["name"] and base.startswith("MFVI") == (row["posterior"] == "MFVI")
        }
    return rows


def curve(inside: Tensor, outside: Tensor) -> dict[str, Any]:
    """Densities of the entropy over `[low, high]`, as text: they are many."""
    low, high = -0.2, max(2.5, outside.max().item() + 0.2)
    points = torch.linspace(low, high, POINTS, dtype=torch.float64)
    texts = [" ".join(f"{d:.3g}" for d in ood.density(v, points).tolist()) for v in (inside, outside)]
    return {"low": low, "high": high, "inside": texts[0], "outside": texts[1]}


Pair = tuple[Tensor, Tensor]


def difference(one: Pair, other: Pair | None = None) -> tuple[float, float]:
    """AUROC of one score, or the difference of two on the same inputs, with its error (DeLong et al., 1988)."""
    placed = _placements(*one)
    if other is not None:
        placed = [a - b for a, b in zip(placed, _placements(*other), strict=True)]
    return placed[0].mean().item(), math.sqrt(sum(p.var().item() / len(p) for p in placed))


def _placements(inside: Tensor, outside: Tensor) -> list[Tensor]:
    """For each outlier the share of the others below it, and for each of those the share of outliers above it."""
    return [_share_below(outside, inside), 1 - _share_below(inside, outside)]


def _share_below(values: Tensor, others: Tensor) -> Tensor:
    ordered = others.sort().values.contiguous()
    left, right = (torch.searchsorted(ordered, values.contiguous(), right=r) for r in (False, True))
    return (left + right).double() / (2 * len(ordered))
