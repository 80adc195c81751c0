"""Yes or no, once or many times: `p(y = 1 | f) = σ(f)` for each logit on its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli
from torch.nn import functional as F

from propagauss.checks import kind, positive
from propagauss.errors import InputError, nearest
from propagauss.gaussian import Gaussian
from propagauss.inputs import check_targets
from propagauss.likelihoods.base import (
    Decomposition,
    Free,
    Held,
    Likelihood,
    Moments,
    Root,
    Terms,
    diagonal_root,
    one_class,
)
from propagauss.likelihoods.information import information_of_logits
from propagauss.likelihoods.links import checked
from propagauss.likelihoods.sigmoids import SIGMOID_LINKS
from propagauss.likelihoods.temperature import Tempered, free_temperature, gaps


@dataclass(frozen=True, eq=False)
class BernoulliLikelihood(Likelihood):
    """`p(y = 1 | f) = σ(f)`, for one logit (`[B]` or `[B, 1]`) or for any number of independent ones (multi-label).

    Args:
        link: "probit", or "quadrature" for the integral itself.
        temperature: divides the logit of the probability that the link gave.
        positive_weight: how often a target of 1 counts in the loss of the fit, as `pos_weight` in
            `BCEWithLogitsLoss`: one number, or a tensor that broadcasts to the targets of a sample. Predictions do not
            change.
    """

    link: str = "probit"
    temperature: float | Tensor = 1.0
    positive_weight: float | Tensor = 1.0

    name: ClassVar[str] = "binary"
    columns: ClassVar[Mapping[str, str]] = {
        "prediction": "round of probabilities",
        "entropy": "binary_entropy of probabilities",
    }

    def __post_init__(self) -> None:
        if not isinstance(self.link, str) or self.link not in SIGMOID_LINKS:
            hint = nearest(self.link, SIGMOID_LINKS) if isinstance(self.link, str) else ""
            raise InputError(f"there is no link {kind(self.link)}{hint} (there are {', '.join(SIGMOID_LINKS)})")
        if not isinstance(self.temperature, Tensor):  # whoever gives a tensor has looked at it: it may be traced
            positive(self.temperature, "temperature")
        weight = self.positive_weight
        if not isinstance(weight, Tensor):
            positive(weight, "positive_weight")
        elif weight.is_complex() or not (weight.isfinite() & (weight > 0)).all():
            raise InputError("positive_weight has values that are not positive numbers: give the weight of each label")

    # -- the fit

    def matched(self, output: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        f, y = super().matched(output, y.byte() if y.dtype == torch.bool else y, where)
        return f, _labels(y, f"{where}: ")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """`Σ log(1 + e^f) - y f`"""
        return F.binary_cross_entropy_with_logits(f, y.to(f), reduction="sum")

    def root(self, f: Tensor) -> Root:
        """The Hessian is `diag(p (1 - p))`, `p = σ(f)`, whatever the labels."""
        return diagonal_root(f.sigmoid() * (-f).sigmoid())

    def terms(self, output: Tensor, y: Tensor, where: str) -> Terms:
        """With `w` the weight of the positive labels, the terms of one count `w` times."""
        f, y = self.matched(output, y, where)
        fixed = f.detach()
        weights = torch.where(y > 0, self._weights(output, where), 1.0)
        losses = F.binary_cross_entropy_with_logits(fixed.double(), y.double(), reduction="none")
        curvature = weights * fixed.sigmoid() * (-fixed).sigmoid()
        return Terms(f, (weights * losses).sum().item(), y.numel(), diagonal_root(curvature.to(fixed)))

    def _weights(self, output: Tensor, where: str) -> Tensor:
        """Of the positive labels, as `[B or 1, C]`."""
        weight = torch.as_tensor(self.positive_weight, dtype=torch.float64, device=output.device)
        sizes = output.shape[1:] if weight.dim() < output.dim() else output.shape
        try:
            return weight.expand(sizes).reshape(-1, math.prod(output.shape[1:]))
        except RuntimeError as error:
            raise InputError(
                f"{where}: positive_weight has shape {tuple(weight.shape)}, outputs {tuple(output.shape)}: give one "
                "number, or a weight for each label"
            ) from error

    # -- the prediction

    def predictive(self, latent: Gaussian) -> Bernoulli:
        logits = self.logits(self.moments(latent))
        return Bernoulli(logits=logits, validate_args=checked(logits))

    def logits(self, moments: Moments) -> Tensor:
        """`log P(y = 1) - log P(y = 0)`, over the temperature."""
        yes, no = SIGMOID_LINKS[self.link](moments.mean, moments.covariance)
        temperature = self.temperature
        return (yes - no) / (temperature.to(yes) if isinstance(temperature, Tensor) else temperature)

    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        logits = self.logits(moments)
        return F.logsigmoid(torch.where(y > 0, logits, -logits))

    def decompose(self, latent: Gaussian) -> Decomposition:
        """The entropy of each prediction by origin: the mutual information of label and latent, and the rest."""
        entropy = self.predictive(latent).entropy()
        found = information_of_logits(latent.mean / float(self.temperature), latent.variance)
        epistemic = found.minimum(entropy)  # a link is no integral, so that its entropy may be below
        return Decomposition(epistemic, entropy - epistemic)

    def summary(self, latent: Gaussian) -> dict[str, Tensor]:
        probs, parts = self.predictive(latent).probs, self.decompose(latent)
        own = {"probabilities": probs, "prediction": (probs > 0.5).long(), "entropy": parts.total}
        return own | parts._asdict() | {"latent_variance": latent.variance}

    # -- calibration

    def targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        return _labels(check_targets(y.byte() if isinstance(y, Tensor) and y.dtype == torch.bool else y, shape))

    def lacking(self, data: Sequence[Held]) -> str:
        return one_class(torch.cat([y.flatten() for _, y in data]))

    def free(self, data: Sequence[Held]) -> Free:
        """The temperature; what the link gives does not depend on it."""
        plain = replace(self, temperature=1.0)

        def at_scale(scale: float) -> Tempered:
            linked = ((plain.logits(moments.scaled(scale)), y) for moments, y in data)
            pairs = ((torch.stack([torch.zeros_like(logits), logits], -1), y > 0) for logits, y in linked)
            return Tempered([gaps(both, label.long(), torch.ones_like(label)) for both, label in pairs])

        return free_temperature(lambda t: replace(self, temperature=t), at_scale)

    # -- the export

    def exported(self, latent: Gaussian) -> dict[str, Tensor]:
        probabilities = self.logits(self.moments(latent)).sigmoid()
        return {"mean": latent.mean, "variance": latent.variance, "probabilities": probabilities}

    def details(self) -> dict[str, Any]:
        return {"link": self.link, "temperature": float(self.temperature)}


def _labels(y: Tensor, where: str = "") -> Tensor:
    if not ((y == 0) | (y == 1)).all():
        raise InputError(f"{where}likelihood='binary' needs labels of 0 and 1, one for each logit")
    return y
