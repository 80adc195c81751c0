"""Both engines on one posterior, each in three forms: as it is, with its scale fitted, and calibrated.

Calibrated is what `calibrate` does: a temperature after the link, and the largest scale that validation data allow.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from experiments.methods.classify import Batches, Label, Link, Predictor, Remembered
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.posteriors import Posterior
from propagauss.predictive.classifier import Classifier

STREAMLINED, LINEARISED = "streamlined", "linearised"
AS_IT_IS, FITTED, CALIBRATED = "as it is", "scale fitted", "calibrated"
LINKS: dict[str, Link] = {STREAMLINED: "probit", LINEARISED: "mean_field"}  # what each has to give: variances, or more


def both(
    model: nn.Module, posterior: Posterior, name: str, validation: Batches, **options: Any
) -> Iterator[list[Predictor]]:
    """The predictors of each engine in turn: latents of all batches are kept."""
    for found in classifiers(model, posterior, name, validation, **options):
        yield _predictors(found)


def forms(net: Any, method: str, name: str, validation: Batches) -> list[Predictor]:
    """One engine in all forms; `net` gives its latents."""
    return _predictors(_forms(net, method, name, validation))


def _predictors(found: Iterable[tuple[Label, Classifier]]) -> list[Predictor]:
    return [Predictor(label, classifier.log_probs) for label, classifier in found]


def classifiers(
    model: nn.Module, posterior: Posterior, name: str, validation: Batches, **options: Any
) -> Iterator[list[tuple[Label, Classifier]]]:
    """`options` are those of `streamline`."""
    example = validation[0][0][:2]
    yield _forms(streamline(model, posterior, example, **options), STREAMLINED, name, validation)
    yield _forms(linearise(model, posterior, example), LINEARISED, name, validation)


def _forms(net: Any, method: str, name: str, validation: Batches) -> list[tuple[Label, Classifier]]:
    latents, link, found = Remembered(net), LINKS[method], []
    for form in (AS_IT_IS, FITTED, CALIBRATED):
        classifier = _fitted(latents, link, form, validation)
        found.append((Label(method, name, link, form, classifier.scale, form != AS_IT_IS), classifier))
    return found


def _fitted(net: Any, link: Link, form: str, validation: Batches) -> Classifier:
    classifier = Classifier(net, link)
    if form == FITTED:
        return classifier.fit_scale(validation, progress=False)
    if form == CALIBRATED:
        with warnings.catch_warnings():  # that the plain model is preferred is read off the stored scale
            warnings.simplefilter("ignore")
            classifier.calibrate(validation, progress=False)
    return classifier
