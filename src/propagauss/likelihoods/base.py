"""What every likelihood `p(y | f)` can do, for whoever asks: the fit, a predictor, calibration, the export.

`f` is the output of the network. The fit looks at one value of it, all the others at the latent: a Gaussian over `f`.
A likelihood is a small frozen value (a link, a noise), it holds no network and no data. One file holds one likelihood;
`registry.py` lists them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributions import Distribution

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import check_targets
from propagauss.structures.full import last_blocks

Root = Callable[[int], Tensor]  # c -> [B, C], column c of a root of the curvature of every sample


class Terms(NamedTuple):
    """What the likelihood says to the fit about one batch, at unit noise."""

    output: Tensor  # [B, C], with its graph
    loss: float  # negative log-likelihood; without its constant if there is a noise
    targets: int  # number of target values that count
    column: Root


class Moments(NamedTuple):
    """What of the latent a predictive depends on: its mean, and variances or covariances at each position."""

    mean: Tensor  # [..., C]
    covariance: Tensor  # variances [..., C], or covariances [..., C, C] over the last dimension
    index: Tensor | None = None  # [..., k], if the covariance is that of k chosen entries alone

    def map(self, function: Callable[[Tensor], Tensor]) -> Moments:
        mean = function(self.mean)
        index = None if self.index is None else self.index.to(mean.device)
        return Moments(mean, function(self.covariance), index)

    def scaled(self, factor: Tensor | float) -> Moments:
        """Same mean, covariance multiplied by `factor`."""
        return self._replace(covariance=self.covariance * factor)


class Held(NamedTuple):
    """Held-out data of one batch."""

    moments: Moments
    y: Tensor


class Decomposition(NamedTuple):
    """Two parts of the uncertainty of a prediction: variances that add up to its own or, for classes, entropies."""

    epistemic: Tensor  # of the latent: from not knowing the weights
    aleatoric: Tensor  # of the noise: remains however much data there is

    @property
    def total(self) -> Tensor:
        """Variance of the prediction, or its entropy."""
        return self.epistemic + self.aleatoric


class AtScale(Protocol):
    """What a likelihood with one number of its own keeps of the latents at one scale, to fit that number there."""

    def densities(self, number: Tensor, /) -> list[Tensor]:
        """Log densities by batch."""
        ...

    def best(self, starts: list[Tensor], bounds: tuple[float, float], count: int, /) -> Tensor:
        """The number of least mean loss over `count` targets; `bounds` are those of its logarithm."""
        ...


class Free(NamedTuple):
    """Positive numbers of a likelihood that calibration can fit together with the scale, over their logarithms."""

    name: str
    bounds: list[tuple[float, float]]  # of each logarithm
    guess: Callable[[float], Tensor]  # scale -> numbers to start from
    replaced: Callable[[Tensor], Likelihood]  # numbers -> the likelihood that has them
    # for a number that comes after all the work that depends on the scale
    at_scale: Callable[[float], AtScale] | None = None
    # what fits without any variance -> bounds with some, for numbers that could undo all that the variance does
    bounds_beside: Callable[[Tensor], list[tuple[float, float]]] | None = None


def bounds_beside(share: float, bounds: list[tuple[float, float]]) -> Callable[[Tensor], list[tuple[float, float]]]:
    """Bounds beside a latent variance: above `share`, or that share of what fits without variance if it is below 1.

    A smaller number would undo what the variance does: a temperature multiplies logits again that the link divided by
    large standard deviations, and a factor of the noise takes it away where the latent has taken its place.
    """

    def found(plain: Tensor) -> list[tuple[float, float]]:
        least = (share * plain.flatten().clamp(max=1)).log().tolist()
        return [(max(low, each), high) for each, (low, high) in zip(least, bounds, strict=True)]

    return found


class Likelihood(abc.ABC):
    """`p(y | f)`. The defaults suit likelihoods that have one output for each target value: `y` in the shape of `f`."""

    name: ClassVar[str]  # as `fit_laplace` and exported files call it
    noisy: ClassVar[bool] = False  # whether `log p = -loss / σ² - n log(σ √2π)` with a `σ` that the fit may choose
    pointwise: ClassVar[bool] = True  # whether each target depends on one output alone, so that batches can be joined
    normal: ClassVar[bool] = False  # whether the predictive is a normal distribution, so that intervals follow from it
    columns: ClassVar[Mapping[str, str]] = {}  # what `propagauss predict` adds: {column: "argmax" or "entropy" of ...}

    def joined(self, output: Any) -> Any:
        """What a model or a network returned as one tensor or Gaussian, if the likelihood can take several outputs."""
        return output

    # -- the fit: at one value of the output

    @abc.abstractmethod
    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """`-Σ log p(y | f)` over the batch, one number: `f [B, C]` and `y` as `matched` gave them."""

    @abc.abstractmethod
    def root(self, f: Tensor) -> Root:
        """Columns `s_c` of a root of the curvature, `Λ = Σ_c s_c s_cᵀ`, at `f [B, C]`.

        `Λ` is the Hessian of the loss in `f`, or the Fisher matrix where the Hessian depends on `y` or is indefinite:
        it must be positive semi-definite. For one that is diagonal, see `diagonal_root`.
        """

    def matched(self, output: Tensor, y: Tensor, where: str) -> tuple[Tensor, Tensor]:
        """What the model returned as `[B, C]`, and the targets that go with it; raise if they do not fit."""
        if y.is_complex() or y.dtype == torch.bool:
            raise InputError(f"{where}: targets are {y.dtype}; real numbers are needed: use targets.float()")
        fits = y.shape == output.shape or y.shape == (*output.shape, 1) or (*y.shape, 1) == output.shape
        if not fits or output.dim() == 0:
            raise InputError(
                f"{where}: targets have shape {tuple(y.shape)}, outputs {tuple(output.shape)}; they must agree"
            )
        output = output.reshape(len(y), -1)
        return output, y.reshape(output.shape)

    def terms(self, output: Tensor, y: Tensor, where: str) -> Terms:
        """All that the fit asks about one batch; `where` begins the text of errors."""
        f, y = self.matched(output, y, where)
        fixed = f.detach()
        return Terms(f, self.loss(fixed.double(), y).item(), y.numel(), self.root(fixed))

    # -- the prediction: from a Gaussian over the output

    @abc.abstractmethod
    def predictive(self, latent: Gaussian) -> Distribution:
        """`p(y) = E[p(y | f)]` over the latent."""

    @abc.abstractmethod
    def log_predictive(self, moments: Moments, y: Tensor) -> Tensor:
        """`log E[p(y | f)]` of each target; differentiable, and nothing is checked."""

    def moments(self, latent: Gaussian) -> Moments:
        """What of the latent `log_predictive` asks for."""
        return Moments(latent.mean, latent.variance)

    @abc.abstractmethod
    def decompose(self, latent: Gaussian) -> Decomposition:
        """The variance of the prediction by origin, each in the shape of the mean; for classes its entropy."""

    def summary(self, latent: Gaussian) -> dict[str, Tensor]:
        """What a data set of predictions is made of: `mean`, `stddev` and its parts `epistemic` and `aleatoric`.

        For classes `probabilities`, `prediction`, `entropy` and its parts, and `latent_variance`.
        """
        parts = self.decompose(latent)
        return {"mean": self.predictive(latent).mean, "stddev": parts.total.sqrt()} | parts._asdict()

    # -- calibration: on held-out data

    def targets(self, y: Tensor, shape: torch.Size) -> Tensor:
        """The targets that go with a latent of this shape; raise if they do not fit."""
        return check_targets(y, shape)

    def points(self, y: Tensor) -> int:
        """How many data points targets from `targets` are."""
        return len(y)

    def count(self, y: Tensor) -> int:
        """How many target values targets from `targets` hold: an NLPD is a mean over them."""
        return y.numel()

    def check(self, moments: Moments) -> None:
        """Refuse moments for which there is no predictive density."""
        return None

    def lacking(self, data: Sequence[Held]) -> str:
        """What these data lack to calibrate anything, as a sentence; empty if they lack nothing."""
        return ""

    def free(self, data: Sequence[Held]) -> Free | None:
        """What of the likelihood itself can be fitted to these data (one batch if `pointwise`); None if nothing can."""
        return None

    # -- the export

    @abc.abstractmethod
    def exported(self, latent: Gaussian) -> dict[str, Tensor]:
        """The named outputs of an exported predictor, which `propagauss predict` writes; they are traced."""

    def details(self) -> dict[str, Any]:
        """What an exported file tells about the likelihood."""
        return {}


def one_class(labels: Tensor) -> str:
    """As `Likelihood.lacking`: labels of one class cannot tell how sure predictions should be."""
    if len(labels) and bool((labels == labels[0]).all()):
        return (
            f"all {len(labels)} labels are of class {int(labels[0])}, which cannot tell how sure predictions should "
            "be: give validation data of two classes or more"
        )
    return ""


def diagonal_root(diagonal: Tensor) -> Root:
    """The root of a diagonal curvature, `√d_c e_c`: `d [B, C]`, not negative."""

    def column(c: int) -> Tensor:
        found = torch.zeros_like(diagonal)
        found[:, c] = diagonal[:, c].sqrt()
        return found

    return column


def last_dimension(latent: Gaussian, covariances: bool = True) -> Tensor:
    """Covariances over the last dimension at each position, `[..., C, C]`; variances `[..., C]` if there are no others.

    Also variances if `covariances` is False: they take less memory.
    """
    if not (latent.is_full and covariances):
        return latent.variance
    return last_blocks(latent.covariance, latent.shape)
