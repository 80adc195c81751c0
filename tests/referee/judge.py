"""A case and a mode -> a verdict: exact, approximated as stated, refused; or one of the ways to be wrong."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import propagauss as pg
from referee.case import Case, built
from referee.literal import literal
from referee.truth import SCALE, Mode, Statement, first_order, outputs_of, random_posterior

TOLERANCE = 1e-6  # of a covariance, relative to the largest variance
MEAN_TOLERANCE = 1e-12
GOOD = ("exact", "approximated", "refused")


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of `GOOD`, or `wrong`, `wrong mean`, `not finite`, `crash`; `how` says more."""

    case: str
    mode: Mode
    structure: str
    kind: str
    how: str = ""
    error: float = 0.0  # relative, of what is wrong

    @property
    def is_good(self) -> bool:
        return self.kind in GOOD

    def __str__(self) -> str:
        return (
            f"{self.case} [{self.mode}, {self.structure} posterior]: {self.kind}{': ' + self.how if self.how else ''}"
        )


def judge(case: Case, mode: Mode, structure: str = "diagonal") -> Verdict:
    """Streamline and compare with the truth of the mode."""
    model, inputs, names = built(case)
    return judge_model(case.name, model, inputs, names, mode, structure, case.generator())


def judge_model(
    name: str,
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    names: list[str],
    mode: Mode,
    structure: str,
    generator: torch.Generator,
) -> Verdict:
    shapes = {n: p.shape for n, p in model.named_parameters() if n in names}
    posterior, covariance = random_posterior(shapes, structure, generator)
    with torch.no_grad():
        means = outputs_of(model(*inputs))

    def verdict(kind: str, how: str = "", error: float = 0.0) -> Verdict:
        return Verdict(name, mode, structure, kind, how, error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            net = pg.streamline(model, posterior, inputs, covariance=mode)
        except pg.PropagaussError as error:
            return verdict("refused", _reason(error))
        except Exception as error:
            return verdict("crash", f"streamline raised {_words(error)}")
        try:
            with torch.no_grad():
                result = net(*inputs)
        except Exception as error:
            return verdict("crash", f"streamlined, then net(x) raised {_words(error)}")
    gaussians = [g for g in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(g, pg.Gaussian)]
    if len(gaussians) != len(means):
        return verdict("crash", f"{len(means)} outputs are expected, {len(gaussians)} came")
    for g, mean in zip(gaussians, means, strict=True):
        if g.mean.shape != mean.shape:
            return verdict("wrong mean", f"shape {tuple(g.mean.shape)} rather than {tuple(mean.shape)}")
        if not bool(g.mean.isfinite().all() and g.variance.isfinite().all()):
            return verdict("not finite", "the mean or variance holds NaN or infinity")
        error = _distance(g.mean, mean, mean)
        if not error < MEAN_TOLERANCE:
            return verdict("wrong mean", f"relative error {error:.2g}", error)

    truth, wrong = _agreeing(model, inputs, names, covariance, mode, gaussians)
    if truth is None:
        return verdict("wrong", *wrong)
    whole = first_order(model, inputs, names, covariance, "first order")
    exact = all(_error(t, _as(mode, w, g), mode) < TOLERANCE for t, w, g in zip(truth, whole, gaussians, strict=True))
    return verdict("exact") if exact else verdict("approximated", "; ".join(notes(net.plan)))


def _agreeing(
    model: nn.Module, inputs: tuple[Tensor, ...], names: list[str], covariance: Tensor, mode: Mode, found: list[Any]
) -> tuple[list[Tensor] | None, tuple[str, float]]:
    """The truth that the result agrees with, or what is wrong with it.

    That of the mode comes first. A library that holds less than it says is right, too.
    """
    wrong = ("", 0.0)
    statements: tuple[Statement, ...] = ("full", "first order") if mode == "full" else _DIAGONAL
    for what in statements:
        if what in ("full", "first order"):
            truth = first_order(model, inputs, names, covariance, what)
            truth = [_as(mode, t, g) for t, g in zip(truth, found, strict=True)]
        else:
            truth = [variance for _, variance in literal(model, inputs, names, covariance, what)]
        differences = [_difference(g, t, mode) for g, t in zip(found, truth, strict=True)]
        bad = [d for d in differences if d is not None]
        if not bad:
            return truth, wrong
        wrong = wrong if wrong[0] else bad[0]
    return None, wrong


_DIAGONAL: tuple[Statement, ...] = ("diagonal", "diagonal, nothing held", "first order")


def _as(mode: Mode, covariance: Tensor, g: Any) -> Tensor:
    """A covariance as the mode gives it."""
    return covariance if mode == "full" else covariance.diagonal(dim1=-2, dim2=-1).reshape(g.mean.shape)


def _difference(g: Any, truth: Tensor, mode: Mode) -> tuple[str, float] | None:
    got = g.covariance if mode == "full" else g.variance
    if got.shape != truth.shape:
        return f"shape {tuple(got.shape)} rather than {tuple(truth.shape)}", float("inf")
    error = _error(got, truth, mode)
    return None if error < TOLERANCE else (_comparison(got, truth, mode, error), error)


def _error(got: Tensor, truth: Tensor, mode: Mode) -> float:
    return _distance(got, truth, _variances(truth, mode))


def notes(plan: pg.Plan) -> list[str]:
    """What the plan says is assumed, without what is exact to first order anyway."""
    found = dict.fromkeys(step.note for step in plan if step.note and not _is_first_order(step.note))
    return [*found, *(n.partition(":")[0] for n in plan.notes)] or ["covariances between entries dropped"]


def _is_first_order(note: str) -> bool:
    return "exact" in note or note.startswith("linearised") or "routed" in note


def _variances(truth: Tensor, mode: Mode) -> Tensor:
    return truth.diagonal(dim1=-2, dim2=-1) if mode == "full" else truth


def _distance(got: Tensor, truth: Tensor, scale: Tensor) -> float:
    """Largest difference, relative to the largest entry of `scale`; where that is zero, to a typical variance."""
    if truth.numel() == 0:
        return 0.0
    return float((got - truth).abs().max()) / (float(scale.abs().max()) or SCALE)


def _comparison(got: Tensor, truth: Tensor, mode: Mode, error: float) -> str:
    """Standard deviations as users would see them, at the worst place."""
    a, b = (_variances(t, mode).clamp(min=0).sqrt().flatten() for t in (got, truth))
    if mode == "full" and float((a.square() - b.square()).abs().max()) < TOLERANCE * float(b.square().max()):
        return f"variances agree, covariances differ by {error:.2g} of the largest variance"
    worst = int((a - b).abs().argmax())
    ratio = float(a[worst] / b[worst]) if b[worst] else float("inf")
    return f"sd {float(a[worst]) / SCALE**0.5:.4g}, truth {float(b[worst]) / SCALE**0.5:.4g} (ratio {ratio:.3g})"


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines[1:] if " at '" in line]
    return "; ".join(dict.fromkeys(named)) or lines[0]


def _words(error: Any) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
