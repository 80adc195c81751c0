"""Fit the few numbers that calibrate a predictive (scale, noise, temperature) by minimising the NLPD on held-out data.

The latents are computed once; everything after that is arithmetic on cached tensors, in double precision, over the
logarithm of a number that can therefore never become negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, as_tensor, batches, call, check_labels, check_targets, device_of
from propagauss.predictive.links import Link

BOUNDS = (1e-6, 1e6)


@dataclass(frozen=True)
class FitReport:
    """What a fit did: the number before and after, and the mean NLPD of the data it was fitted on."""

    name: str
    before: float
    after: float
    nlpd_before: float
    nlpd_after: float
    points: int
    noise: Tensor | None = None

    @property
    def at_bound(self) -> bool:
        """Whether the best value is at the end of the range, where the NLPD would still fall a little."""
        return any(abs(math.log(self.after / bound)) < 1e-3 for bound in BOUNDS)

    def __str__(self) -> str:
        text = f"{self.name} {self.before:.4g} -> {self.after:.4g}"
        if self.noise is not None:
            text += ", noise " + (" ".join(f"{n:.4g}" for n in self.noise.flatten().tolist()))
        text += f": NLPD {self.nlpd_before:.4f} -> {self.nlpd_after:.4f} on {self.points} points"
        return text + (" (at the end of the range)" if self.at_bound else "")


# -- classification


def class_spread(latent: Gaussian, covariances: bool = True) -> Tensor:
    """Spread over the classes (last dimension) at each position: covariances `[..., C, C]`, or variances `[..., C]`."""
    if not (latent.is_full and covariances):
        return latent.variance
    batch, *inner, classes = latent.shape
    positions = math.prod(inner)
    blocks = latent.covariance.reshape(batch, positions, classes, positions, classes)
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(batch, *inner, classes, classes)


def fit_class_scale(
    net: Any, loader: Iterable[Any], link: Link, start: float, covariances: bool = True, progress: bool = True
) -> FitReport:
    """`argmin_s mean -log link(m, s C)[y]`."""
    cached = []
    for latent, y in _latents(net, loader, progress):
        labels = check_labels(y, latent.shape[:-1], latent.shape[-1])
        cached.append((_double(latent.mean), _double(class_spread(latent, covariances)), labels.cpu()))
    points = sum(labels.numel() for *_, labels in cached)

    def nlpd(scale: float) -> float:
        return sum(pick(link(mean, spread * scale), y).sum().item() for mean, spread, y in cached) / points

    return _report("scale", nlpd, start, points)


def fit_temperature(model: Any, loader: Iterable[Any], start: float, progress: bool = True) -> FitReport:
    """`argmin_T mean -log softmax(logits / T)[y]`; `model` maps inputs to logits."""
    cached = []
    for x, y in batches(loader, device_of(model), "caching logits" if progress else None):
        with torch.no_grad():
            logits = _finite(as_tensor(call(model, x)))
        cached.append((_double(logits), check_labels(y, logits.shape[:-1], logits.shape[-1]).cpu()))
    points = sum(labels.numel() for _, labels in cached)

    def nlpd(temperature: float) -> float:
        return sum(pick((logits / temperature).log_softmax(-1), y).sum().item() for logits, y in cached) / points

    return _report("temperature", nlpd, start, points)


def pick(log_probs: Tensor, labels: Tensor) -> Tensor:
    """`-log p[y]` at each position: `[..., C], [...] -> [...]`."""
    return -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# -- regression


def fit_regression_scale(
    net: Any, loader: Iterable[Any], noise: Tensor | None, start: float, fit_noise: bool = False, progress: bool = True
) -> FitReport:
    """`argmin_s mean -log N(y; m, s v + noise²)`, over the noise as well if asked.

    `noise` is one standard deviation or one per output; None is none yet, to be fitted for each output.

    Scale and noise are told apart only by how the latent variance differs between points: where it hardly does, the sum
    is well determined and the two numbers are not.
    """
    errors, variances = [], []
    for latent, y in _latents(net, loader, progress):
        targets = check_targets(y.to(latent.device), latent.shape)
        errors.append((_double(targets) - _double(latent.mean)).square())
        variances.append(_double(latent.variance))
    error, variance = torch.cat(errors), torch.cat(variances)
    if noise is None:
        outputs = error.shape[1:][-1:]
        noise = error.new_zeros(outputs if outputs.numel() > 1 else ())
    noise = _double(noise)
    check_noise(noise, error.shape)

    def nlpd(scale: Tensor | float, noise: Tensor) -> Tensor:
        total = scale * variance + noise.square()
        return 0.5 * (total.log() + error / total + math.log(2 * math.pi)).mean()

    points = error.shape[0]
    if fit_noise:
        scale, fitted = _fit_scale_and_noise(nlpd, error, variance, noise, start)
        # there may be no predictive before: zero noise and zero variance
        before = nlpd(start, noise).nan_to_num(math.inf, posinf=math.inf, neginf=math.inf).item()
        return FitReport("scale", start, scale, before, nlpd(scale, fitted).item(), points, fitted)
    check_positive(variance + noise.square())
    return _report("scale", lambda scale: nlpd(scale, noise).item(), start, points)


def check_noise(noise: Tensor, shape: torch.Size) -> None:
    """Refuse noise levels that do not belong to the last dimension of outputs of `shape`."""
    if noise.dim() and noise.shape != shape[1:][-1:]:
        raise InputError(
            f"there are {noise.numel()} noise levels for outputs of shape {tuple(shape)}: give one per output"
        )


def check_positive(variance: Tensor) -> None:
    """Refuse a predictive without any spread: its density is infinite or zero everywhere."""
    if not (variance > 0).all():
        raise InputError(
            "the predictive variance is zero at some points, where neither the latent has any nor is there noise: "
            "give Regressor(net, noise=...) or call fit_scale(loader, fit_noise=True)"
        )


def _fit_scale_and_noise(
    nlpd: Callable[[Tensor | float, Tensor], Tensor], error: Tensor, variance: Tensor, noise: Tensor, start: float
) -> tuple[float, Tensor]:
    over = tuple(range(error.dim() - noise.dim()))
    mean_error, mean_variance = error.mean(over).clamp(min=1e-24), variance.mean(over)
    low, high = math.log(BOUNDS[0]), math.log(BOUNDS[1])
    # noise far below the errors would let a point that is hit exactly send the density to infinity
    bounds = [(low, high), *[(t - math.log(1e4), t + math.log(10)) for t in mean_error.sqrt().log().flatten().tolist()]]

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(theta, requires_grad=True)
        with torch.enable_grad():
            value = nlpd(leaf[0].exp(), leaf[1:].exp().reshape(noise.shape))
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.item(), gradient.numpy()

    def initial(scale: float) -> np.ndarray:
        # the noise that, with this scale, explains the errors on average
        guess = (mean_error - scale * mean_variance).clamp(min=0).maximum(1e-4 * mean_error).sqrt()
        return np.concatenate([[math.log(scale)], guess.log().reshape(-1).numpy()])

    # the given scale comes first and wins ties, so that it stays where the data say nothing about it
    others = sorted(map(initial, np.logspace(-6, 6, 25)), key=lambda theta: objective(theta)[0])[:3]
    runs = [minimize(objective, t, jac=True, bounds=bounds, method="L-BFGS-B") for t in (initial(start), *others)]
    best = min(runs, key=lambda run: round(float(run.fun), 10))
    theta = torch.from_numpy(best.x)
    return math.exp(best.x[0]), theta[1:].exp().reshape(noise.shape)


# -- shared


def minimise(objective: Callable[[float], float], start: float, bounds: tuple[float, float] = BOUNDS) -> float:
    """The positive number that minimises `objective`; `start` if no other is better.

    A coarse grid over the logarithm first (two points per decade), so that a second minimum cannot trap the search.
    """
    low, high = math.log(bounds[0]), math.log(bounds[1])
    grid = np.linspace(low, high, 1 + round(2 * (high - low) / math.log(10)))
    values = np.nan_to_num([objective(math.exp(t)) for t in grid], nan=math.inf)
    at = int(values.argmin())
    bracket = (grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)])
    fine = minimize_scalar(lambda t: objective(math.exp(t)), bounds=bracket, method="bounded", options={"xatol": 1e-6})
    value, best = min((float(fine.fun), float(fine.x)), (float(values[at]), float(grid[at])))
    return math.exp(best) if value < objective(start) - 1e-10 else start


def _report(name: str, nlpd: Callable[[float], float], start: float, points: int) -> FitReport:
    best = minimise(nlpd, start)
    return FitReport(name, start, best, nlpd(start), nlpd(best), points)


def _latents(net: Any, loader: Iterable[Any], progress: bool) -> Iterable[tuple[Gaussian, Tensor]]:
    for x, y in batches(loader, device_of(net), "caching latents" if progress else None):
        with torch.no_grad():
            latent = check_finite(as_latent(call(net, x)), x)
        yield latent, y


def _finite(mean: Tensor) -> Tensor:
    if not mean.isfinite().all():
        raise InputError("the net returned values that are not finite: check its inputs and its weights")
    return mean


def check_finite(latent: Gaussian, inputs: Any) -> Gaussian:
    """Refuse a latent that overflowed; `inputs` is what it was computed from. Nothing is read while tracing."""
    if torch.compiler.is_compiling():
        return latent
    spread = latent.covariance if latent.is_full else latent.variance
    try:  # sums are finite only if every entry is, and cost less than asking each
        sound = math.isfinite(latent.mean.sum().item() + spread.sum().item())
    except RuntimeError:  # values cannot be read under vmap, or from tensors without any
        return latent
    bad = {} if sound else {"mean": ~latent.mean.isfinite(), "variance": ~spread.isfinite()}
    found = {name: int(each.reshape(each.shape[:1].numel(), -1).any(1).sum()) for name, each in bad.items()}
    if any(found.values()):
        raise InputError(_overflow(found, latent, inputs))
    return latent


def _overflow(found: dict[str, int], latent: Gaussian, inputs: Any) -> str:
    """Which moments are not finite, for how many samples, what came in, and what to do."""
    which = " and ".join(f"{name}s of {count}" for name, count in found.items() if count)
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    text = f"the net returned values that are not finite: {which} of {latent.shape[:1].numel()} samples"
    broken = sum(int((~t.isfinite()).sum()) for t in tensors)
    if broken:
        return f"{text}, and the input itself has {broken} values that are not finite: remove or impute them"
    if tensors:
        text += f". The largest input is {max(t.abs().max().item() for t in tensors):.3g} in size"
    return (
        f"{text}. Variances need squares, which overflow early in {latent.dtype}: rescale or normalise the input, or "
        "use double precision; if the input is of ordinary size, the posterior is so wide that variances overflow "
        "(in a gated MLP two random values are multiplied): use a larger prior precision, or posterior.scale(0.01), "
        "before streamline"
    )


def _double(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float64)
