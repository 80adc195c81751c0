"""Metrics against torchmetrics and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor
from torch.distributions import Categorical, MultivariateNormal, Normal

from propagauss import InputError
from propagauss.metrics import (
    accuracy,
    aurc,
    auroc,
    brier,
    coverage_at_risk,
    ece,
    nlpd,
    predictive_entropy,
    risk_coverage,
    rmse,
)


def classification(n: int = 500, classes: int = 5, sharpness: float = 2.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(n, classes, generator=g, dtype=torch.float64)
    labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=g).squeeze(1)
    return logits.log_softmax(-1), labels


def test_nlpd_of_classes():
    log_probs, y = classification()
    expected = log_loss(y.numpy(), log_probs.exp().numpy(), labels=list(range(5)))
    assert nlpd(log_probs, y) == pytest.approx(expected)
    assert nlpd(Categorical(logits=log_probs), y) == pytest.approx(expected)
    assert nlpd(log_probs, y[:, None]) == pytest.approx(expected)
    assert nlpd(log_probs.reshape(100, 5, 5), y.reshape(100, 5)) == pytest.approx(expected)


def test_nlpd_of_a_confident_wrong_prediction_is_finite():
    predictive = Categorical(logits=torch.tensor([[0.0, 1e4]]))
    assert nlpd(predictive, torch.tensor([0])) == pytest.approx(1e4)


def test_nlpd_of_targets():
    mean, stddev, y = torch.randn(20, 2), torch.rand(20, 2) + 0.1, torch.randn(20, 2)
    literal = [
        0.5 * math.log(2 * math.pi * s * s) + (t - m) ** 2 / (2 * s * s)
        for m, s, t in zip(mean.flatten().tolist(), stddev.flatten().tolist(), y.flatten().tolist(), strict=True)
    ]
    assert nlpd(Normal(mean, stddev), y) == pytest.approx(sum(literal) / 40, rel=1e-5)
    joint = MultivariateNormal(mean, torch.diag_embed(stddev.square()))
    assert nlpd(joint, y) == pytest.approx(sum(literal) / 20, rel=1e-5)
    one = Normal(mean[:, :1], stddev[:, :1])
    assert nlpd(one, y[:, 0]) == pytest.approx(nlpd(one, y[:, :1]))


def test_rmse():
    torchmetrics = pytest.importorskip("torchmetrics")
    mean, y = torch.randn(50, 2), torch.randn(50, 2)
    expected = torchmetrics.functional.mean_squared_error(mean, y, squared=False).item()
    assert rmse(mean, y) == pytest.approx(expected) == rmse(Normal(mean, 1.0), y)


def test_rmse_does_not_broadcast():
    assert rmse(torch.zeros(3, 1), torch.ones(3)) == 1.0
    with pytest.raises(InputError, match="targets have shape"):
        rmse(torch.zeros(3, 2), torch.ones(3, 1))


def test_accuracy():
    torchmetrics = pytest.importorskip("torchmetrics")
    log_probs, y = classification()
    expected = torchmetrics.functional.accuracy(log_probs, y, "multiclass", num_classes=5, average="micro").item()
    assert accuracy(log_probs, y) == pytest.approx(expected) == accuracy(Categorical(logits=log_probs), y)


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("sharpness", [0.5, 2.0, 8.0])
def test_ece(bins, sharpness):
    torchmetrics = pytest.importorskip("torchmetrics")
    log_probs, y = classification(sharpness=sharpness)
    expected = torchmetrics.functional.calibration_error(log_probs.exp(), y, "multiclass", bins, num_classes=5).item()
    assert ece(log_probs.exp(), y, bins) == pytest.approx(expected, abs=1e-6)
    assert ece(Categorical(logits=log_probs), y, bins) == pytest.approx(expected, abs=1e-6)


def test_ece_of_certain_predictions():
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert ece(probs, torch.tensor([0, 1])) == 0.0 and ece(probs, torch.tensor([1, 0])) == 1.0


def test_brier_against_a_literal_sum():
    log_probs, y = classification(n=30)
    literal = 0.0
    for p, label in zip(log_probs.exp().tolist(), y.tolist(), strict=True):
        literal += sum((q - (c == label)) ** 2 for c, q in enumerate(p)) / 30
    assert brier(log_probs.exp(), y) == pytest.approx(literal) == brier(Categorical(logits=log_probs), y)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=40))
def test_auroc_with_ties(points):
    scores, positive = torch.tensor([p[0] for p in points]).float(), torch.tensor([p[1] for p in points])
    if positive.all() or not positive.any():
        with pytest.raises(InputError, match="one kind"):
            auroc(scores, positive)
        return
    assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive.numpy(), scores.numpy()))
    assert auroc(scores, positive.long()) + auroc(-scores, positive) == pytest.approx(1.0)


def test_predictive_entropy():
    log_probs, _ = classification()
    expected = Categorical(logits=log_probs).entropy()
    torch.testing.assert_close(predictive_entropy(Categorical(logits=log_probs)), expected)
    torch.testing.assert_close(
        predictive_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).exp(), torch.tensor([1.0, 2.0]).double()
    )


def literal_risks(confidence, correct):
    """The error rate among the k most confident, for each k, by a loop."""
    order = sorted(range(len(confidence)), key=lambda i: -confidence[i])  # stable
    return [sum(not correct[i] for i in order[:k]) / k for k in range(1, len(order) + 1)]


@pytest.mark.parametrize("ties", [False, True])
def test_selective_prediction_against_loops(ties):
    torch.manual_seed(0)
    confidence = torch.rand(40, dtype=torch.float64)
    confidence = (confidence * 5).round() if ties else confidence
    correct = torch.rand(40) < 0.7
    risks = literal_risks(confidence.tolist(), correct.tolist())
    assert aurc(confidence, correct) == pytest.approx(sum(risks) / 40)
    assert aurc(confidence.numpy(), correct.numpy()) == aurc(confidence.float(), correct.long())
    torch.testing.assert_close(risk_coverage(confidence, correct).risk, torch.tensor(risks, dtype=torch.float64))
    for risk in (0.0, 0.1, 0.25, 0.3, 1.0):
        expected = max((k / 40 for k, r in enumerate(risks, 1) if r <= risk), default=0.0)
        assert coverage_at_risk(confidence, correct, risk) == pytest.approx(expected)


def test_selective_prediction_at_the_ends():
    confidence = torch.tensor([0.9, 0.8, 0.7, 0.6])
    assert aurc(confidence, torch.ones(4)) == 0 and coverage_at_risk(confidence, torch.ones(4), 0.0) == 1
    assert aurc(confidence, torch.zeros(4)) == 1 and coverage_at_risk(confidence, torch.zeros(4), 0.5) == 0
    right_first, wrong_first = torch.tensor([1, 1, 1, 0]), torch.tensor([0, 1, 1, 1])
    assert aurc(confidence, right_first) == pytest.approx(1 / 16)
    assert aurc(confidence, wrong_first) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert coverage_at_risk(confidence, wrong_first, 0.25) == 1  # the largest, though fewer have a larger risk


def test_ties_keep_the_order_that_was_given():
    same, correct = torch.ones(3), torch.tensor([1, 0, 0])
    assert aurc(same, correct) == pytest.approx((0 + 1 / 2 + 2 / 3) / 3)
    assert aurc(same, correct.flip(0)) == pytest.approx((1 + 1 + 2 / 3) / 3)


def test_a_score_without_information_has_the_error_rate():
    torch.manual_seed(0)
    correct = torch.rand(20_000) < 0.8
    assert aurc(torch.rand(20_000), correct) == pytest.approx(0.2, abs=0.02)


NONE = torch.zeros(0, 3)
LABELS = torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        *[(lambda f=f: f(NONE, LABELS), "empty") for f in (nlpd, accuracy, ece, brier)],
        (lambda: nlpd(Normal(NONE, 1.0), NONE), "empty"),
        (lambda: rmse(NONE, NONE), "empty"),
        (lambda: predictive_entropy(NONE), "empty"),
        (lambda: auroc(torch.zeros(0), torch.zeros(0)), "empty"),
        (lambda: nlpd(torch.tensor([[0.5, 0.5]]), torch.tensor([0])), "log-probabilities"),
        (lambda: nlpd(torch.full((1, 2), math.nan), torch.tensor([0])), "log-probabilities"),
        (lambda: ece(torch.tensor([[2.0, 3.0]]), torch.tensor([0])), "sum to one"),
        (lambda: brier(torch.tensor([[1.5, -0.5]]), torch.tensor([0])), "non-negative"),
        (lambda: ece(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), bins=0), "at least 1"),
        (lambda: accuracy(torch.zeros(2, 3), torch.tensor([0, 3])), "0 to 2"),
        (lambda: accuracy(torch.zeros(2, 3), torch.zeros(2)), "integers"),
        (lambda: auroc(torch.tensor([1.0, math.nan]), torch.tensor([0, 1])), "NaN"),
        (lambda: auroc(torch.tensor([1.0, 2.0]), torch.tensor([1, 2])), "0 and 1"),
        (lambda: auroc(torch.ones(2, 1), torch.ones(2)), "shape"),
        (lambda: aurc(torch.zeros(0), torch.zeros(0)), "empty"),
        (lambda: aurc(torch.ones(2, 1), torch.ones(2)), "shape"),
        (lambda: aurc([0.1, 0.2], torch.ones(2)), r"confidences is a list of 2.*torch\.as_tensor"),
        (lambda: aurc(torch.ones(2), np.array(["a", "b"])), "correct is a NumPy array"),
        (lambda: aurc(torch.tensor([1.0, math.nan]), torch.ones(2)), "NaN"),
        (lambda: aurc(torch.ones(2), torch.tensor([1, 2])), "prediction == label"),
        (lambda: coverage_at_risk(torch.ones(2), torch.ones(2), 2), "risk is 2; it must be an error rate"),
        (lambda: coverage_at_risk(torch.ones(2), torch.ones(2), "low"), "risk is 'low'"),
    ],
)
def test_errors(run, message):
    with pytest.raises(InputError, match=message):
        run()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64])
def test_labels_of_any_integers(dtype: torch.dtype) -> None:
    """156 is a class, though it is -100 in eight bits."""
    labels = torch.tensor([156, 7])
    assert accuracy(torch.eye(200)[labels], labels.to(dtype)) == 1.0
    assert accuracy(torch.eye(200)[[3, 7]], labels.to(dtype)) == 0.5
