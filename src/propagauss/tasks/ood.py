"""Outlier detection: scores that come with one forward pass, how well they tell outliers apart, and their densities.

All scores but `max_probability` grow with how unusual an input is. `ood.scores` reads them off a `pg.Classifier`;
`from_probs` and `from_samples` make the same object from other methods, so that all can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical

from propagauss import metrics
from propagauss.checks import floating, kind, positive, tensor, whole
from propagauss.checks import seed as checked_seed
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, device_of, input_batches, taken_by
from propagauss.likelihoods.information import information
from propagauss.likelihoods.links import MOST_SAMPLES
from propagauss.predictive.classifier import Classifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BUDGET = 2**24  # numbers held at once
BANDWIDTH = 0.25  # of the paper's density plots; see `density`


@dataclass(frozen=True)
class Scores:
    """Scores of `N` inputs, each `[N]`; None where the method has no such score."""

    entropy: Tensor  # of the predictive: `-Σ_c p_c log p_c`
    max_probability: Tensor  # the one that falls for outliers
    epistemic_variance: Tensor | None = None  # of the logits, averaged over classes (those of `outputs=` alone)
    mutual_information: Tensor | None = None  # between label and logits: `H[E p] - E H[p]`

    def by_name(self) -> dict[str, Tensor]:
        """The scores there are, each turned so that more is more unusual."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return found | {"max_probability": 1 - self.max_probability}

    @staticmethod
    def cat(parts: Sequence[Scores]) -> Scores:
        """Scores of several batches as one."""
        if not isinstance(parts, (tuple, list)) or not all(isinstance(part, Scores) for part in parts) or not parts:
            raise InputError("there are no scores to join: give a list of what ood.scores returned")
        joined = {}
        for field in fields(Scores):
            values = [getattr(part, field.name) for part in parts]
            joined[field.name] = None if values[0] is None else torch.cat(values)
        return Scores(**joined)


class Detection(NamedTuple):
    """How well a score tells outliers (the positives) from the rest."""

    auroc: float
    aupr: float  # average precision
    fpr95: float  # share of the others that are flagged when 95% of the outliers are


# -- scores


@torch.no_grad()
def scores(net: Any, data: Any, samples: int = 512, seed: int = 0) -> Scores:
    """All scores of the inputs, from one pass.

    Args:
        net: a `pg.Classifier`, or a net that maps inputs to a Gaussian over logits (then with the probit link). Entropy
            and maximum probability are those of the classifier; the other two are of its latent, whatever the link.
        data: one batch (a tensor, or a tuple or dict of inputs), or an iterable of batches such as a `DataLoader`, with
            or without targets, which are not used.
        samples, seed: the draws behind the mutual information (see `mutual_information`).
    """
    classifier = net if isinstance(net, Classifier) else Classifier(net)
    samples, seed = whole(samples, "samples", 2, MOST_SAMPLES), checked_seed(seed)
    if isinstance(data, (Tensor, tuple, Mapping)):
        return _scores_of_batch(classifier, data, samples, seed)
    inputs = input_batches(data, taken_by(classifier.net), device_of(classifier.net))
    return Scores.cat([_scores_of_batch(classifier, x, samples, seed) for x in inputs])


def _scores_of_batch(classifier: Classifier, x: Any, samples: int, seed: int) -> Scores:
    latent = classifier.latent(x)
    information = mutual_information(latent, samples, seed)
    probs = classifier.log_probs_of(latent).exp()
    variance = latent.variance if latent.chosen is None else latent.variance.gather(-1, latent.chosen.index)
    return Scores(
        metrics.predictive_entropy(probs).flatten(),
        probs.max(-1).values.double().flatten(),
        variance.double().mean(-1).flatten(),
        information.flatten(),
    )


def from_probs(probs: Tensor | Categorical) -> Scores:
    """Entropy and maximum probability of any predictions, `[N, classes]`."""
    entropy = metrics.predictive_entropy(probs)
    values = probs.probs if isinstance(probs, Categorical) else probs
    return Scores(entropy, values.double().max(-1).values)


def from_samples(logits: Tensor) -> Scores:
    """Scores of sampled logits `[samples, N, classes]`: probabilities are averaged, variances are over the samples."""
    floating(logits, "the tensor of logits")
    if logits.dim() != 3 or len(logits) < 2:
        raise InputError(f"logits have shape {tuple(logits.shape)}; [samples, N, classes] with 2 samples are needed")
    log_probs = logits.double().log_softmax(-1)
    mean = log_probs.logsumexp(0) - math.log(len(logits))
    inner = -(log_probs.exp() * log_probs).sum(-1).mean(0)
    entropy = -(mean.exp() * mean).sum(-1)
    return Scores(entropy, mean.exp().max(-1).values, logits.double().var(0).mean(-1), (entropy - inner).clamp(min=0))


@torch.no_grad()
def mutual_information(latent: Gaussian, samples: int = 512, seed: int = 0) -> Tensor:
    """`H[E softmax(f)] - E H[softmax(f)]`, `f` the latent, in nats: `[batch, ..., classes] -> [batch, ...]`.

    Two classes: by quadrature over the difference of the logits. More: over quasi-random draws of the logits, the same
    for every input and at every call; the error falls about as 1/samples.

    Where only some classes are uncertain (`linearise(outputs=...)`), they share a fixed probability, and what is known
    about a label beyond that is known among them: their own information, times that probability.
    """
    latent = as_latent(latent)
    if latent.mean.dim() < 2 or latent.mean.shape[-1] < 2:
        shape = tuple(latent.mean.shape)
        raise InputError(f"the latent has shape {shape}; [batch, ..., classes] with two classes is needed")
    samples, seed = whole(samples, "samples", 2, MOST_SAMPLES), checked_seed(seed)
    return information(latent.to(torch.float64), samples, seed)


# -- how well they work


def evaluate(inside: Tensor, outside: Tensor) -> Detection:
    """One score on known data and on outliers, `[N]` and `[M]`; more should mean more unusual. See `Detection`."""
    for name, values in (("inside", inside), ("outside", outside)):
        tensor(values, f"the tensor of scores {name}")
        if values.dim() != 1 or not len(values) or values.is_complex():
            raise InputError(f"the scores {name} must be a tensor [N] of real numbers that is not empty")
    values = torch.cat([inside.detach().double().cpu(), outside.detach().double().cpu()])
    positive = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()
    auroc = metrics.auroc(values, positive)
    order = values.argsort(descending=True)
    ranked = values[order]
    last = torch.cat([ranked[1:] != ranked[:-1], torch.ones(1, dtype=torch.bool)])  # equal scores are flagged together
    found = positive[order].cumsum(0)[last].double()
    flagged = (torch.arange(len(values)) + 1)[last].double()
    recall, precision = found / len(outside), found / flagged
    aupr = (recall.diff(prepend=torch.zeros(1, dtype=torch.float64)) * precision).sum().item()
    false = (flagged - found) / len(inside)
    return Detection(auroc, aupr, false[recall >= 0.95 - 1e-12][0].item())


def evaluate_all(inside: Scores, outside: Scores) -> dict[str, Detection]:
    """`evaluate` for every score that both have."""
    for name, each in (("inside", inside), ("outside", outside)):
        if not isinstance(each, Scores):
            raise InputError(f"the scores {name} are {kind(each)}; give what ood.scores returns")
    ours, theirs = inside.by_name(), outside.by_name()
    return {name: evaluate(values, theirs[name]) for name, values in ours.items() if name in theirs}


# -- densities


def density(values: Tensor, points: Tensor, bandwidth: float = BANDWIDTH, relative: bool = True) -> Tensor:
    """Kernel density estimate with a Gaussian kernel, at `points`.

    The kernel's standard deviation is `bandwidth` times that of the values (as `scipy.stats.gaussian_kde` has it), or
    `bandwidth` itself if not `relative`. The paper says "a variance of 0.25"; its axes go up to 7.5 and 12, which a
    kernel of that variance (at most 0.8 high) cannot reach and one relative to the data can.
    """
    bandwidth = positive(bandwidth, "bandwidth")
    values, points = floating(values, "the tensor of values"), floating(points, "the tensor of points")
    if values.dim() != 1 or not len(values):
        raise InputError("a density needs values of shape [N], at least one")
    if not points.numel():
        raise InputError("there are no points at which to estimate the density")
    values, points = values.detach().double(), points.double()
    width = bandwidth * float(values.std()) if relative and len(values) > 1 else bandwidth
    width = max(width, 1e-3)  # a spike, where all values agree
    total = torch.zeros_like(points)
    for some in values.split(max(1, _BUDGET // len(points))):
        total += torch.exp(-0.5 * ((points.unsqueeze(-1) - some) / width).square()).sum(-1)
    return total / (len(values) * width * math.sqrt(2 * math.pi))


def plot(
    groups: Mapping[str, tuple[Tensor, Tensor]],
    bandwidth: float = BANDWIDTH,
    relative: bool = True,
    label: str = "entropy",
    names: tuple[str, str] = ("inside", "outside"),
) -> Figure:
    """Densities of a score inside and outside, `{"MAP": (inside, outside), ...}`, side by side; needs matplotlib."""
    from propagauss.tasks.plots import densities

    if not isinstance(groups, Mapping) or not groups:
        raise InputError('there is nothing to plot: give a dictionary such as {"MAP": (inside, outside)}')
    for title, pair in groups.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"the scores of '{title}' are {kind(pair)}; give a pair (inside, outside)")
        for values in pair:
            floating(values, f"the tensor of scores of '{title}'")
    everything = torch.cat([v.detach().double().cpu() for pair in groups.values() for v in pair])
    low, high = everything.min().item(), everything.max().item()
    margin = 0.08 * (high - low) + 1e-3
    points = torch.linspace(low - margin, high + margin, 400, dtype=torch.float64)
    panels: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for title, pair in groups.items():
        inside, outside = (density(v.cpu(), points, bandwidth, relative).numpy() for v in pair)
        panels[title] = (points.numpy(), inside, outside)
    return densities(panels, label, names)
