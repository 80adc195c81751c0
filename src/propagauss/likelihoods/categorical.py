"""Classes: `p(y | f) = softmax(f)_y`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn import functional as F

from propagauss.checks import kind, positive, seed, whole
from propagauss.errors import InputError, nearest
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, check_some_labels
from propagauss.likelihoods.base import (
    Decomposition,
    Free,
    Held,
    Likelihood,
    Moments,
    Root,
    Terms,
    last_dimension,
    one_class,
)
from propagauss.likelihoods.information import entropy_of, information
from propagauss.likelihoods.links import LINKS, MOST_SAMPLES, Link, categorical, monte_carlo, shared
from propagauss.likelihoods.temperature import Tempered, free_temperature, gaps

IGNORED = -100  # as PyTorch and Hugging Face mark labels that do not count
MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class CategoricalLikelihood(Likelihood):
    """`p(y | f) = softmax(f)_y` at every position; its mean over the latent comes from a link.

    Logits are `[B, C]`, `[B, T, C]`, or have their classes in `class_dim`; probabilities have the classes last.

    Args:
        link: a name in `links.LINKS`.
        samples, seed: the draws of the "monte_carlo" link, and of the mutual information in `decompose`.
        class_dim: which dimension of the logits holds the classes. None: the last one, for up to three dimensions; with
            more, there must be a number. In the fit, None is the dimension that labels do not have.
        ignore_index: labels of this value are skipped: in the fit, in calibration.
        temperature: divides the log-probabilities that the link gave, which are then normalised again.
    """

    link: str = "probit"
    samples: int = 512
    seed: int = 0
    class_dim: int | None = None
    ignore_index: int = IGNORED
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
        if self.class_dim is not None and not whole(self.class_dim, "class_dim", -MOST_DIMENSIONS, MOST_DIMENSIONS):
            raise InputError("class_dim is 0, which is the batch: give the dimension of the classes, such as 1 or -1")
        whole(self.ignore_index, "ignore_index", -(2**62), 2**62)
        if not isinstance(self.temperature, Tensor):  # whoever gives a tensor has looked at it: it may be traced
            positive(self.temperature, "temperature")

    # -- the fit

    def matched(self, output: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        """Logits `[B, P C]` of `P` positions, classes last, and labels `[B, P]`."""
        if y.is_floating_point() or y.dtype == torch.bool:
            raise InputError(f"{where}: labels must be integers, the index of the class; got {y.dtype}")
        dim = self.dim_of(output, y, where)
        y = y.long()
        counted = y[y != self.ignore_index]
        low, high = (int(counted.min()), int(counted.max())) if len(counted) else (0, 0)
        if low < 0 or high >= output.shape[dim]:
            raise InputError(
                f"{where}: labels go from {low} to {high}, but the model has classes 0 to {output.shape[dim] - 1}"
            )
        return output.movedim(dim, -1).reshape(len(y), -1), y.reshape(len(y), -1)

    def dim_of(self, output: Tensor, y: Tensor, where: str) -> int:
        """The dimension of the classes: the one that labels do not have."""
        shape = tuple(output.shape)
        without = {d: shape[:d] + shape[d + 1 :] for d in range(1, len(shape))}
        if self.class_dim is not None:
            dim = self.class_dim % len(shape) if -len(shape) <= self.class_dim < len(shape) else 0
            without = {d: rest for d, rest in without.items() if d == dim}
        found = [d for d, rest in without.items() if rest == tuple(y.shape)]
        if output.dim() < 2 or (found and shape[found[0]] < 2) or (not found and shape[-1:] == (1,)):
            raise InputError(
                f"{where}: classification needs outputs [B, C] with at least 2 classes, got {shape}; for a model with "
                "one logit use likelihood='binary'"
            )
        if len(found) != 1:
            remedy = (
                "which is the dimension of the classes? Say it, with likelihood=CategoricalLikelihood(class_dim=...)"
                if found
                else "labels must be [B] for outputs [B, C], or the shape of the outputs without the dimension of the "
                "classes (class_dim)"
            )
            raise InputError(f"{where}: labels have shape {tuple(y.shape)}, outputs {shape}; {remedy}")
        return found[0]

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(f.reshape(y.numel(), -1), y.flatten(), ignore_index=self.ignore_index, reduction="sum")

    def root(self, f: Tensor) -> Root:
        """The Hessian `diag(p) - p pᵀ` has a root with columns `√p_c (e_c - p)`."""
        return _root_by_position(f.softmax(1).unsqueeze(1), torch.ones_like(f[:, :1]))

    def terms(self, output: Tensor, y: Tensor, where: str) -> Terms:
        """Positions are independent of each other given the output, so that each has a root of its own."""
        f, labels = self.matched(output, y, where)
        fixed, dim = f.detach().unflatten(1, (labels.shape[1], -1)), self.dim_of(output, y, where)
        counted = labels != self.ignore_index
        column = _root_by_position(fixed.softmax(-1), counted.to(f))
        last = output.movedim(dim, -1).shape

        def as_the_model_has_it(c: int) -> Tensor:
            return column(c).reshape(last).movedim(-1, dim).reshape(len(labels), -1)

        loss = self.loss(fixed.double(), labels).item()
        return Terms(output.reshape(len(labels), -1), loss, int(counted.sum()), as_the_model_has_it)

    # -- the prediction

    def predictive(self, latent: Gaussian) -> Categorical:
        return categorical(self.log_probs(latent))

    def log_probs(self, latent: Gaussian) -> Tensor:
        """Log-probabilities of the classes, finite and normalised: `[batch, ..., classes]`."""
        return self._probabilities(self.moments(latent))

    def decompose(self, latent: Gaussian) -> Decomposition:
        """The entropy of each prediction by origin: the mutual information of class and latent, and the rest.

        The mutual information is taken over fixed draws of the logits, with their covariance where there is one.
        """
        entropy = entropy_of(self.log_probs(latent))
        # a link is no integral, so that its entropy may be below
        last = self.classes_last(latent)
        epistemic = information(last, self.samples, self.seed, float(self.temperature)).minimum(entropy)
        return Decomposition(epistemic, entropy - epistemic)

    def summary(self, latent: Gaussian) -> dict[str, Tensor]:
        log_probs, parts = self.log_probs(latent), self.decompose(latent)
        own = {"probabilities": log_probs.exp(), "prediction": log_probs.argmax(-1), "entropy": parts.total}
        return own | parts._asdict() | {"latent_variance": self._around_mean(latent)}

    def _around_mean(self, latent: Gaussian) -> Tensor:
        """Variance of the logits around their mean over classes, averaged over classes: `[B, ...]`.

        What all logits have in common changes no probability.
        """
        latent = self.classes_last(latent)
        covariance = last_dimension(latent) if latent.chosen is None else latent.chosen.covariance
        if covariance.dim() == latent.mean.dim():
            return covariance.mean(-1) * (1 - 1 / covariance.shape[-1])
        return (covariance.diagonal(dim1=-2, dim2=-1).mean(-1) - covariance.mean((-2, -1))).clamp(min=0)

    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        return self._picked(self._probabilities(moments), y)

    def _picked(self, log_probs: Tensor, y: Tensor) -> Tensor:
        """The log-probability of each label; 0 for those that are skipped."""
        skipped = y == self.ignore_index
        return -pick(log_probs, y.masked_fill(skipped, 0)).masked_fill(skipped, 0)

    def moments(self, latent: Gaussian) -> Moments:
        latent = self.classes_last(latent)
        chosen = latent.chosen
        if chosen is not None:
            return Moments(latent.mean, chosen.covariance, chosen.index)
        return Moments(latent.mean, last_dimension(latent, covariances=self.link != "probit"))

    def classes_last(self, latent: Gaussian) -> Gaussian:
        """Logits `[B, ..., C]`; an error if it is not known, or cannot be, which dimension the classes are in."""
        latent = as_latent(latent)
        dim = self._class_dim(latent.shape)
        if dim == latent.mean.dim() - 1:
            return latent
        if latent.chosen is not None:
            raise InputError("linearise(outputs=...) chooses entries of the last dimension: class_dim must be that one")
        return latent.mapped(latent.mean.movedim(dim, -1), lambda t: t.movedim(dim, -1))

    def _class_dim(self, shape: torch.Size) -> int:
        """Of logits of this shape, counted from the front."""
        dims, dim = len(shape), -1 if self.class_dim is None else self.class_dim
        if self.class_dim is None and dims > 3:
            raise InputError(
                f"the net returned logits of shape {tuple(shape)}: say which dimension holds the classes, with "
                "class_dim=1 for [B, C, H, W] or class_dim=-1 for [..., C]"
            )
        inside = -dims < dim < dims and dim % dims > 0
        if not inside or shape[dim] < 2:
            raise InputError(
                f"the net returned logits of shape {tuple(shape)}; a Classifier needs [batch, ..., classes] with two "
                f"classes or more{'' if self.class_dim is None else f' in dimension {self.class_dim} (class_dim)'}: "
                "for a model with one logit use pg.BinaryClassifier"
            )
        return dim % dims

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
        dim = self._class_dim(shape)
        positions = torch.Size((*shape[:dim], *shape[dim + 1 :]))
        found, counted = check_some_labels(y, positions, shape[dim], self.ignore_index)
        return found.masked_fill(~counted, self.ignore_index)

    def points(self, y: Tensor) -> int:
        return self.count(y)

    def count(self, y: Tensor) -> int:
        return int((y != self.ignore_index).sum())

    def lacking(self, data: Sequence[Held]) -> str:
        return one_class(torch.cat([y[y != self.ignore_index] for _, y in data]))

    def free(self, data: Sequence[Held]) -> Free:
        """The temperature; what the link gives does not depend on it."""

        def at_scale(scale: float) -> Tempered:
            linked = ((self._linked_of(moments.scaled(scale)), y) for moments, y in data)
            return Tempered([gaps(log_probs, y, y != self.ignore_index) for log_probs, y in linked])

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


def _root_by_position(p: Tensor, weight: Tensor) -> Root:
    """`√p_c (e_c - p)` at one of the positions, zero at the others: `p [B, P, C]`, `weight [B, P]` is 0 or 1."""
    classes = p.shape[2]

    def column(number: int) -> Tensor:
        position, c = divmod(number, classes)
        here = p[:, position]
        found = torch.zeros_like(p)
        found[:, position] = -here
        found[:, position, c] += 1
        found[:, position] *= (weight[:, position] * here[:, c].sqrt()).unsqueeze(1)
        return found.flatten(1)

    return column


def pick(log_probs: Tensor, labels: Tensor) -> Tensor:
    """`-log p[y]` at each position: `[..., C], [...] -> [...]`."""
    return -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
