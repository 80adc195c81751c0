"""How good predictions are: a few pure functions.

Class probabilities come as a `Categorical` or as a tensor `[..., classes]`; labels are class indices `[...]`, of which
those of -100 are skipped. A `Bernoulli` is two classes, with labels 0 and 1 in its shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution

from propagauss.checks import floating as real
from propagauss.checks import from_numpy, kind, number, tensor, whole
from propagauss.errors import InputError
from propagauss.inputs import check_some_labels, check_targets
from propagauss.likelihoods.categorical import IGNORED, pick

MOST_BINS = 1 << 20
Classes = Categorical | Bernoulli | Tensor


def nlpd(predictive: Distribution | Tensor, target: Tensor) -> float:
    """`mean -log p(y)`: negative log predictive density, or log-loss for classes.

    Args:
        predictive: a `Categorical` or log-probabilities `[..., classes]`, with labels as `target`; or any distribution
            over real numbers with targets, averaged over everything that it treats as separate (`Normal`: each output).
    """
    predictive, target = _as_classes(predictive, target)
    if not isinstance(predictive, Distribution) or isinstance(predictive, Categorical):
        log_probs = _real(predictive.logits if isinstance(predictive, Categorical) else predictive)
        total = log_probs.detach().double().logsumexp(-1)
        if not (total.abs() < 1e-2).all():
            raise InputError(
                "nlpd takes log-probabilities or a distribution: use logits.log_softmax(-1) or probs.log()"
            )
        return pick(*_judged(log_probs, target)).double().mean().item()
    shape = predictive.batch_shape + predictive.event_shape
    target = check_targets(target, shape)
    _check_some(target)
    if not _supports(predictive, target):
        raise InputError(f"targets have values that {kind(predictive)} cannot take: see its .support")
    return -predictive.log_prob(target).double().mean().item()


def _supports(predictive: Distribution, target: Tensor) -> bool:
    try:
        support: Any = predictive.support
    except NotImplementedError:
        return True
    return support is None or bool(support.check(target).all())


def rmse(predictive: Distribution | Tensor, target: Tensor) -> float:
    """`√ mean (E[y] - y)²`, over all points and outputs; `predictive` is a distribution or its means."""
    mean = _not_nan(_real(predictive.mean if isinstance(predictive, Distribution) else predictive))
    return (mean - check_targets(target, mean.shape)).double().square().mean().sqrt().item()


def accuracy(predictive: Classes, labels: Tensor) -> float:
    """Share of points whose most probable class is the label; a tensor may hold any scores."""
    given, labels = _as_classes(predictive, labels)
    scores = _not_nan(_real(given.logits if isinstance(given, Categorical) else given))
    scores, labels = _judged(scores, labels)
    return (scores.argmax(-1) == labels).double().mean().item()


def ece(predictive: Classes, labels: Tensor, bins: int = 15) -> float:
    """`Σ_b |B_b|/N |accuracy(B_b) - confidence(B_b)|`: expected calibration error of the most probable class.

    `B_b` are the points whose confidence falls in the b-th of `bins` equal parts of [0, 1]. A biased estimate: with few
    points per bin it is well above zero for calibrated predictions too.
    """
    bins = whole(bins, "bins", 1, MOST_BINS)
    given, labels = _as_classes(predictive, labels)
    probs, labels = _judged(_probs(given), labels)
    confidence, top = probs.max(-1)
    gap = (top == labels).double() - confidence
    index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)  # (lower, upper]
    sums = gap.new_zeros(bins).index_add_(0, index.flatten(), gap.flatten())
    return (sums.abs().sum() / gap.numel()).item()


def brier(predictive: Classes, labels: Tensor) -> float:
    """`mean Σ_c (p_c - [y = c])²`, between 0 and 2."""
    given, labels = _as_classes(predictive, labels)
    probs, labels = _judged(_probs(given), labels)
    truth = torch.zeros_like(probs).scatter_(-1, labels.unsqueeze(-1), 1.0)
    return (probs - truth).square().sum(-1).mean().item()


def auroc(scores: Tensor, is_positive: Tensor) -> float:
    """`P(score⁺ > score⁻) + ½ P(score⁺ = score⁻)`: area under the ROC curve, for out-of-distribution detection.

    Args:
        scores: higher means more likely positive, such as the predictive entropy. `[N]`
        is_positive: boolean, or 0 and 1. `[N]`
    """
    scores, is_positive = real(scores, "the tensor of scores"), tensor(is_positive, "is_positive")
    _check_some(scores)
    if scores.shape != is_positive.shape or scores.dim() != 1:
        raise InputError(f"both must have shape [N], got {tuple(scores.shape)} and {tuple(is_positive.shape)}")
    if scores.isnan().any():
        raise InputError("scores have NaN values, which cannot be ranked")
    positive = is_positive.bool()
    if not (positive == is_positive).all():
        raise InputError("is_positive must be boolean, or hold 0 and 1 only")
    count = int(positive.sum())
    if count in (0, len(positive)):
        raise InputError("AUROC needs positive and negative points, but all are of one kind")
    _, group, sizes = scores.unique(return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    ranks = (last - (sizes - 1) / 2)[group]  # equal scores share the middle of their ranks
    wins = ranks[positive].sum().item() - count * (count + 1) / 2
    return wins / (count * (len(positive) - count))


# -- selective prediction: leaving the least confident ones to somebody else


class RiskCoverage(NamedTuple):
    """Error rates among the `k` most confident predictions, for `k = 1..N`."""

    coverage: Tensor  # k / N
    risk: Tensor


def risk_coverage(confidence: Any, correct: Any) -> RiskCoverage:
    """How the error rate grows with the share of the inputs that are predicted, the most confident first.

    Args:
        confidence: higher is more confident, such as the largest probability, or minus the entropy. `[N]`
        correct: whether each prediction was right: boolean, or 0 and 1. `[N]`

    Predictions of equal confidence keep the order in which they are given. Tensors and NumPy arrays are taken.
    """
    confidence = real(_as_tensor(confidence), "the tensor of confidences").detach().cpu()
    correct = tensor(_as_tensor(correct), "correct").detach().cpu()
    _check_some(confidence)
    if confidence.shape != correct.shape or confidence.dim() != 1:
        raise InputError(f"both must have shape [N], got {tuple(confidence.shape)} and {tuple(correct.shape)}")
    if confidence.isnan().any():
        raise InputError("confidences have NaN values, which cannot be ranked")
    if not (correct.bool() == correct).all():
        raise InputError("correct must be boolean, or hold 0 and 1 only: give prediction == label")
    order = confidence.argsort(descending=True, stable=True)
    count = torch.arange(1, len(order) + 1, dtype=torch.float64)
    return RiskCoverage(count / len(order), (~correct.bool()[order]).double().cumsum(0) / count)


def aurc(confidence: Any, correct: Any) -> float:
    """`1/N Σ_k risk(k)`: area under the risk-coverage curve, the mean over `k = 1..N` of the error rate among the `k`
    most confident predictions. Smaller is better; see `risk_coverage` for the arguments and for ties.
    """
    return risk_coverage(confidence, correct).risk.mean().item()


def coverage_at_risk(confidence: Any, correct: Any, risk: float) -> float:
    """The largest `k / N` for which at most a share `risk` of the `k` most confident predictions is wrong; 0 if none.

    See `risk_coverage` for the arguments and for ties.
    """
    risk = number(risk, "risk", "an error rate between 0 and 1", lambda v: 0 <= v <= 1)
    found = risk_coverage(confidence, correct)
    within = found.coverage[found.risk <= risk + 1e-12]
    return within[-1].item() if len(within) else 0.0


def _as_tensor(values: Any) -> Any:
    return from_numpy(values) if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" else values


# -- entropy


def predictive_entropy(predictive: Classes) -> Tensor:
    """`-Σ_c p_c log p_c` of each prediction, in nats: `[..., classes] -> [...]`"""
    if isinstance(predictive, Bernoulli):
        return predictive.entropy().detach().double()
    probs = _probs(predictive)
    return -torch.xlogy(probs, probs).sum(-1)


def _probs(predictive: Any) -> Tensor:
    """Checked class probabilities, in double precision."""
    probs = _real(predictive.probs if isinstance(predictive, Categorical) else predictive).detach().double()
    if not ((probs >= 0).all() and ((probs.sum(-1) - 1).abs() < 1e-2).all()):
        raise InputError("class probabilities must be non-negative and sum to one: use logits.softmax(-1)")
    return probs


def _as_classes(predictive: Any, labels: Any) -> tuple[Any, Any]:
    """A yes or no as two classes, with its labels as their indices; anything else as it is."""
    if not isinstance(predictive, Bernoulli):
        return predictive, labels
    given = tensor(labels, "the tensor of labels")
    found = check_targets(given.byte() if given.dtype == torch.bool else given, predictive.batch_shape)
    if not ((found == 0) | (found == 1)).all():
        raise InputError("the labels of a yes or no must be 0 and 1")
    logits = torch.stack([torch.zeros_like(predictive.logits), predictive.logits], -1)
    return Categorical(logits=logits, validate_args=False), found.long()


def _judged(predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions `[N, classes]` and labels `[N]`, without those that are skipped."""
    found, counted = check_some_labels(labels, predictions.shape[:-1], predictions.shape[-1], IGNORED)
    found, counted = found.to(predictions.device), counted.to(predictions.device)
    _check_some(counted.nonzero())
    return predictions[counted], found[counted]


def _real(predictions: Any) -> Tensor:
    """Predictions for every point: real numbers, at least one."""
    if isinstance(predictions, Distribution):
        raise InputError(f"the predictions are {kind(predictions)}; give a Categorical, or probabilities as a tensor")
    found = real(predictions, "the tensor of predictions")
    if not found.dim():
        raise InputError("the predictions have no dimensions: give [N] or [N, ...]")
    _check_some(found)
    return found


def _not_nan(predictions: Tensor) -> Tensor:
    if predictions.isnan().any():
        raise InputError("the predictions have NaN values: check the inputs and the weights of the model")
    return predictions


def _check_some(values: Tensor) -> None:
    if values.numel() == 0:
        raise InputError("there are no predictions to score: the input is empty")
