"""Which parts of an input a prediction depends on: how much variance each entry takes before the prediction moves.

Every input is replaced by `N(x, diag(s²))`, which goes through the network analytically. From a small start, `s`
follows the gradient of

    cross-entropy(y) - entropy of N(x, diag(s²))

(the paper's eq. sensitivity-loss) until the NLPD of that input has moved by `tolerance`. All entries grow for the sake
of the entropy; those that the prediction depends on grow less. Nothing but stopping bounds the loss from below, so the
maps say which entries lag behind on that path, not how much variance each would stand on its own. Propagation is
linearised: the variance at which a sure prediction gives way may be far beyond the values that inputs have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from propagauss.checks import floating, positive, whole
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import check_labels
from propagauss.likelihoods.categorical import pick
from propagauss.predictive.classifier import Classifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Loss = Callable[[Tensor, Tensor], Tensor]  # log s of some inputs, and which inputs: NLPD of each
_DECAY, _SQUARE_DECAY, _SLACK = 0.9, 0.999, 1e-12  # of Adam


@dataclass(frozen=True)
class _Settings:
    tolerance: float
    start: float
    learning_rate: float
    entropy_weight: float
    max_steps: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole(value, name, 1) if name == "max_steps" else positive(value, name)


@dataclass(frozen=True)
class Sensitivity:
    """How much variance each entry of each input takes. A *small* variance says that the prediction depends on it."""

    x: Tensor
    labels: Tensor
    log_variance: Tensor  # of the uncertain input, in the shape of x and in double precision: differences may be tiny
    steps: Tensor  # [N]
    nlpd_before: Tensor  # [N]
    nlpd_after: Tensor  # [N]
    converged: Tensor  # [N], whether the NLPD moved by the tolerance before the steps ran out

    @property
    def variance(self) -> Tensor:
        """Of the uncertain input, in shape and type of x."""
        return self.log_variance.exp().to(self.x.dtype)

    @property
    def stddev(self) -> Tensor:
        """Of the uncertain input, in shape and type of x."""
        return (self.log_variance / 2).exp().to(self.x.dtype)

    @property
    def maps(self) -> Tensor:
        """From 0, the entry of that input with the largest variance, to 1, the one with the smallest (in its log)."""
        level = -self.log_variance.flatten(1)
        low, high = level.amin(1, keepdim=True), level.amax(1, keepdim=True)
        scaled = (level - low) / (high - low).clamp(min=torch.finfo(level.dtype).tiny)
        return scaled.reshape(self.x.shape).to(self.x.dtype)

    def plot(self, low: float = 0.5, names: list[str] | None = None) -> Figure:
        """Each input with its map above `low`, side by side; needs matplotlib.

        Inputs are images `[N, H, W]` or `[N, C, H, W]` (averaged over C), or vectors: square ones are taken for images,
        others are drawn as a line of colours. `names` are titles, by default the labels.
        """
        from propagauss.tasks.plots import maps

        return maps([("", self.maps)], names or [f"y={y}" for y in self.labels.tolist()], low, self.x)

    def __str__(self) -> str:
        moved = (self.nlpd_after - self.nlpd_before).mean().item()
        return (
            f"{len(self.x)} inputs, {int(self.converged.sum())} converged, on average {self.steps.double().mean():.0f} "
            f"steps, NLPD moved by {moved:.3f}, stddev of the inputs {self.stddev.mean().item():.3g}"
        )


def estimate(
    net: Any,
    x: Tensor,
    labels: Tensor,
    *,
    tolerance: float = 0.1,
    start: float = 1e-5,
    learning_rate: float = 5e-3,
    entropy_weight: float = 1.0,
    max_steps: int = 5000,
    progress: bool = True,
) -> Sensitivity:
    """Grow the input variance of every `x` until the NLPD of its label has moved by `tolerance`.

    Args:
        net: a network streamlined with a Gaussian as the example, with a posterior or without one (None),
            `pg.streamline(model, posterior, pg.Gaussian(x[:2], variance=torch.zeros_like(x[:2])))`; or a
            `pg.Classifier` around one, for another link than probit. (Its scale multiplies what the input variance
            adds, too; `posterior.scale(factor)` before streamlining does not.)
        x: inputs of any shape, the first dimension the batch; each is treated on its own.
        labels: class indices, `[batch]`.
        tolerance: how far the NLPD moves, up or down.
        start: variance of the input at the beginning.
        learning_rate: of Adam, on log s.
        entropy_weight: 1 is the paper's loss. There the entropy outweighs the cross-entropy in every single entry, so
            that all variances grow almost evenly and only the order of the entries says something. With
            `1 / x[0].numel()` the two are of one size, and the variances themselves differ; with much less, the
            NLPD may never move by the tolerance.
        max_steps: inputs that need more are returned as they are then, with `converged` False. So are those that never
            get there: variance without bound leaves all classes equal, which may be less than `tolerance` away.
        progress: show a bar, on terminals only.
    """
    settings = _Settings(tolerance, start, learning_rate, entropy_weight, max_steps)
    floating(x, "x")
    if x.dim() < 2 or len(x) == 0:
        raise InputError("x must be a batch of floating-point inputs: a tensor [batch, ...] with at least one of them")
    if not x.isfinite().all():
        raise InputError("x has values that are not finite")
    classifier = net if isinstance(net, Classifier) else Classifier(net)
    x = x.detach()
    log_stddev = torch.full_like(x, math.log(start) / 2, dtype=torch.float64)
    log_probs = _log_probs(classifier, x, log_stddev)
    labels = check_labels(labels, log_probs.shape[:-1], log_probs.shape[-1]).to(x.device)

    def nlpd(some: Tensor, rows: Tensor) -> Tensor:
        return pick(_log_probs(classifier, x[rows], some), labels[rows]).reshape(len(rows), -1).mean(1)

    before = pick(log_probs, labels).reshape(len(x), -1).mean(1).detach()
    if not before.isfinite().all():
        raise InputError("the net returned values that are not finite: check x and the weights")
    steps, after, found = _descend(nlpd, log_stddev, before, settings, progress)
    return Sensitivity(x, labels, 2 * found, steps, before, after, (after - before).abs() > tolerance)


def _descend(
    nlpd: _Loss, start: Tensor, before: Tensor, settings: _Settings, progress: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam on each input separately; one that has moved far enough is left out of what follows."""
    result, after = start.clone(), before.clone()
    steps = torch.zeros(len(start), dtype=torch.long, device=start.device)
    rows = torch.arange(len(start), device=start.device)
    current, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    with tqdm(total=len(start), desc="sensitivity", leave=False, disable=None if progress else True) as bar:
        for step in range(settings.max_steps + 1):
            now, gradient = _with_gradient(nlpd, current, rows)
            # else the variance has grown beyond all numbers
            sound = now.isfinite() & gradient.flatten(1).isfinite().all(1)
            result[rows[sound]], after[rows[sound]], steps[rows[sound]] = current[sound], now[sound], step
            going = sound & ((now - before[rows]).abs() <= settings.tolerance)
            bar.update(len(rows) - int(going.sum()))
            if not going.any():
                break
            if not going.all():
                rows, gradient = rows[going], gradient[going]
                current, first, second = current[going], first[going], second[going]
            gradient = gradient - settings.entropy_weight  # the entropy is the sum of log s, but for a constant
            first = first.lerp(gradient, 1 - _DECAY)
            second = second.lerp(gradient.square(), 1 - _SQUARE_DECAY)
            root = (second / (1 - _SQUARE_DECAY ** (step + 1))).sqrt() + _SLACK
            current = current - settings.learning_rate / (1 - _DECAY ** (step + 1)) * first / root
    return steps, after, result


def _with_gradient(nlpd: _Loss, log_stddev: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = log_stddev.detach().requires_grad_()
        value = nlpd(leaf, rows)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def _log_probs(classifier: Classifier, x: Tensor, log_stddev: Tensor) -> Tensor:
    try:
        # variance beyond all bounds is one of the ways in which a search can end, and no error
        return classifier.log_probs_of(classifier.unchecked(Gaussian.diagonal(x, (2 * log_stddev).exp().to(x.dtype))))
    except (TypeError, AttributeError) as error:  # a plain model, which cannot take a Gaussian
        raise InputError(
            "the net does not take a Gaussian: give pg.streamline(model, posterior or None, "
            "pg.Gaussian(x[:2], variance=torch.zeros_like(x[:2])))"
        ) from error
