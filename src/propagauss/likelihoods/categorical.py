"""Classes: `p(y | f) = softmax(f)_y`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional as F

from propagauss.checks import kind, positive, seed, whole
from propagauss.errors import InputError, nearest
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, check_labels
from propagauss.likelihoods.base import (
    Decomposition,
    Free,
    Held,
    Likelihood,
    Moments,
    Root,
    free_temperature,
    last_dimension,
)
from propagauss.likelihoods.information import entropy_of, information
from propagauss.likelihoods.links import LINKS, MOST_SAMPLES, Link, categorical, monte_carlo, shared


@dataclass(frozen=True)
class CategoricalLikelihood(Likelihood):
    """`p(y | f) = softmax(f)_y` for logits `[batch, ..., classes]`; its mean over the latent comes from a link.

    Args:
        link: a name in `links.LINKS`.
        samples, seed: the draws of the "monte_carlo" link, and of the mutual information in `decompose`.
        temperature: divides the log-probabilities that the link gave, which are then normalised again.
    """

    link: str = "probit"
    samples: int = 512
    seed: int = 0
    temperature: float | Tensor = 1.0

    name: ClassVar[str] = "classification"
    pointwise: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, str]] = {
        "prediction": "argmax of probabilities",
        "entropy": "entropy of probabilities",
    }

    def __post_init__(self) -> None:
        if not isinstance(self.link, str) or self.link not in LINKS:
            hint = nearest(self.link, LINKS) if isinstance(self.link, str) else ""
            raise InputError(f"there is no link {kind(self.link)}{hint} (there are {', '.join(LINKS)})")
        whole(self.samples, "samples", 2, MOST_SAMPLES)
        seed(self.seed)
        if not isinstance(self.temperature, Tensor):  # whoever gives a tensor has looked at it: it may be traced
            positive(self.temperature, "temperature")

    # -- the fit

    def matched(self, output: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        if output.dim() != 2 or output.shape[1] < 2:
            raise InputError(
                f"{where}: classification needs outputs [B, C] with at least 2 classes, got {tuple(output.shape)}"
                + ("; give a binary model two logits" if output.shape[-1:] == (1,) else "")
            )
        if y.is_floating_point() or y.dtype == torch.bool:
            raise InputError(f"{where}: labels must be integers, the index of the class; got {y.dtype}")
        if y.shape != output.shape[:1]:
            raise InputError(
                f"{where}: labels have shape {tuple(y.shape)}, outputs {tuple(output.shape)}; labels must be [B]"
            )
        y = y.long()
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= output.shape[1]:
            raise InputError(
                f"{where}: labels go from {low} to {high}, but the model has classes 0 to {output.shape[1] - 1}"
            )
        return output, y

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(f, y, reduction="sum")

    def root(self, f: Tensor) -> Root:
        """The Hessian `diag(p) - p pᵀ` has a root with columns `√p_c (e_c - p)`."""
        p = f.softmax(1)

        def column(c: int) -> Tensor:
            unit = torch.zeros_like(p)
            unit[:, c] = 1
            return p[:, c : c + 1].sqrt() * (unit - p)

        return column

    # -- the prediction

    def predictive(self, latent: Gaussian) -> Categorical:
        return categorical(self.log_probs(latent))

    def log_probs(self, latent: Gaussian) -> Tensor:
        """Log-probabilities of the classes, finite and normalised: `[batch, ..., classes]`."""
        latent = as_latent(latent)
        if latent.mean.dim() < 2 or latent.mean.shape[-1] < 2:
            raise InputError(
                f"the net returned logits of shape {tuple(latent.shape)}; a Classifier needs [batch, ..., classes] "
                "with two classes or more: give a model with one logit a second one that is always zero"
            )
        return self._probabilities(self.moments(latent))

    def decompose(self, latent: Gaussian) -> Decomposition:
        """The entropy of each prediction by origin: the mutual information of class and latent, and the rest.

        The mutual information is taken over fixed draws of the logits, with their covariance where there is one.
        """
        entropy = entropy_of(self.log_probs(latent))
        # a link is no integral, so that its entropy may be below
        epistemic = information(latent, self.samples, self.seed, float(self.temperature)).minimum(entropy)
        return Decomposition(epistemic, entropy - epistemic)

    def summary(self, latent: Gaussian) -> dict[str, Tensor]:
        log_probs, parts = self.log_probs(latent), self.decompose(latent)
        own = {"probabilities": log_probs.exp(), "prediction": log_probs.argmax(-1), "entropy": parts.total}
        return own | parts._asdict()

    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        return -pick(self._probabilities(moments), y)

    def moments(self, latent: Gaussian) -> Moments:
        chosen = latent.chosen
        if chosen is not None:
            return Moments(latent.mean, chosen.covariance, chosen.index)
        return Moments(latent.mean, last_dimension(latent, covariances=self.link != "probit"))

    def _probabilities(self, moments: Moments) -> Tensor:
        """Log-probabilities: those of the link, at the temperature."""
        return tempered(self._linked_of(moments), self.temperature)

    def _linked_of(self, moments: Moments) -> Tensor:
        mean, covariance, index = moments
        return self.linked(mean, covariance) if index is None else shared(self.linked, mean, index, covariance)

    @property
    def linked(self) -> Link:
        """The link, with its draws."""
        if self.link == "monte_carlo":
            return functools.partial(monte_carlo, samples=self.samples, seed=self.seed)
        return LINKS[self.link]

    # -- calibration

    def targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        return check_labels(y, shape[:-1], shape[-1])

    def points(self, y: Tensor) -> int:
        return y.numel()

    def free(self, data: Sequence[Held]) -> Free:
        """The temperature; what the link gives does not depend on it."""

        def at_scale(scale: float) -> Callable[[Tensor], list[Tensor]]:
            linked = [(self._linked_of(moments.scaled(scale)), y) for moments, y in data]
            return lambda t: [-pick(tempered(log_probs, t), y) for log_probs, y in linked]

        return free_temperature(lambda t: replace(self, temperature=t), at_scale)

    # -- the export

    def exported(self, latent: Gaussian) -> dict[str, Tensor]:
        return {"mean": latent.mean, "variance": latent.variance, "probabilities": self.log_probs(latent).exp()}

    def details(self) -> dict[str, Any]:
        return {"link": self.link, "temperature": float(self.temperature)}


def tempered(log_probs: Tensor, temperature: float | Tensor) -> Tensor:
    """`p_c^(1/T) / Σ_j p_j^(1/T)`, as logarithms."""
    if isinstance(temperature, Tensor):
        temperature = temperature.to(log_probs.device, log_probs.dtype)
    elif temperature == 1:
        return log_probs
    return (log_probs / temperature).log_softmax(-1)


def pick(log_probs: Tensor, labels: Tensor) -> Tensor:
    """`-log p[y]` at each position: `[..., C], [...] -> [...]`."""
    return -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
