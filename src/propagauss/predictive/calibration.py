"""Fit the few numbers that calibrate a predictive (scale, noise, temperature) by minimising the NLPD on held-out data.

The latents are computed once; everything after that is arithmetic on cached tensors, in double precision, over the
logarithm of a number that can therefore never become negative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.checks import flag
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, as_tensor, batches, call, check_labels, device_of, explained, taken_by
from propagauss.likelihoods.base import Free, Held, Likelihood, Moments
from propagauss.likelihoods.categorical import pick

BOUNDS = (1e-6, 1e6)
TOGETHER = 2**18  # variances or covariances in one batch of cached latents


@dataclass(frozen=True)
class FitReport:
    """What a fit did: the number before and after, and the mean NLPD of the data it was fitted on."""

    name: str
    before: float
    after: float
    nlpd_before: float
    nlpd_after: float
    points: int
    own: Mapping[str, Tensor] = field(default_factory=dict)  # of the likelihood, fitted together with the scale

    @property
    def noise(self) -> Tensor | None:
        """Standard deviations of the observations, if they were fitted."""
        return self.own.get("noise")

    @property
    def at_bound(self) -> bool:
        """Whether the best value is at the end of the range, where the NLPD would still fall a little."""
        return any(abs(math.log(self.after / bound)) < 1e-3 for bound in BOUNDS)

    def __str__(self) -> str:
        text = f"{self.name} {self.before:.4g} -> {self.after:.4g}"
        for name, values in self.own.items():
            text += f", {name} " + " ".join(f"{n:.4g}" for n in values.flatten().tolist())
        text += f": NLPD {self.nlpd_before:.4f} -> {self.nlpd_after:.4f} on {self.points} points"
        return text + (" (at the end of the range)" if self.at_bound else "")


# -- the scale, and what the likelihood has to be fitted beside it

T = TypeVar("T", bound=Likelihood)


def fit_scale(
    net: Any, loader: Iterable[Any], likelihood: T, start: float, fit_own: bool = False, progress: bool = True
) -> tuple[FitReport, T]:
    """`argmin_s mean -log E[p(y | f)]`, `f ~ N(m, s C)`, over the likelihood's own numbers as well if asked.

    Returns what was done, and the likelihood with the numbers that were found.
    """
    cached, points, count, _ = cache(net, loader, likelihood, progress)

    def nlpd(likelihood: Likelihood, scale: Tensor | float) -> Tensor:
        densities = (likelihood.log_predictive(moments.scaled(scale), y) for moments, y in cached)
        return -sum((each.sum() for each in densities), torch.zeros((), dtype=torch.float64)) / count

    if not fit_own:
        for moments, _ in cached:
            likelihood.check(moments)
        return _report("scale", lambda scale: nlpd(likelihood, scale).item(), start, points), likelihood
    free = likelihood.free(cached)
    if free is None:
        raise InputError(f"likelihood='{likelihood.name}' has nothing of its own to fit: only the scale")
    scale, values = _fit_together(lambda scale, values: nlpd(free.replaced(values), scale), free, start)
    fitted = cast(T, free.replaced(values))
    # there may be no predictive before: zero noise and zero variance
    before = nlpd(likelihood, start).nan_to_num(math.inf, posinf=math.inf, neginf=math.inf).item()
    after = nlpd(fitted, scale).item()
    return FitReport("scale", start, scale, before, after, points, {free.name: values}), fitted


class HeldOut(NamedTuple):
    """The latents of held-out data in double precision, in as few batches as memory allows, and what they were."""

    batches: list[Held]
    points: int
    targets: int
    dtype: torch.dtype  # of the latents themselves

    @staticmethod
    def of(batches: list[Held], likelihood: Likelihood, dtype: torch.dtype) -> HeldOut:
        points, targets = (sum(count(y) for _, y in batches) for count in (likelihood.points, likelihood.count))
        if not targets:
            raise InputError("no target of the loader counts, all labels are -100: give data with labels")
        return HeldOut(batches, points, targets, dtype)


def cache(net: Any, loader: Iterable[Any], likelihood: Likelihood, progress: bool) -> HeldOut:
    """Run the net over the data once."""
    return held_out(latents(net, loader, flag(progress, "progress"), likelihood), likelihood)


def held_out(pairs: Iterable[tuple[Gaussian, Tensor]], likelihood: Likelihood) -> HeldOut:
    """Latents and targets, as the likelihood asks for them."""
    found: list[Held] = []
    dtype = torch.float64
    for latent, y in pairs:
        targets, dtype = likelihood.targets(y.to(latent.device), latent.shape), latent.dtype
        found.append(Held(likelihood.moments(latent).map(_double), targets.detach().cpu()))
    return HeldOut.of(_joined(found, math.inf if likelihood.pointwise else TOGETHER), likelihood, dtype)


def _joined(found: list[Held], most: float) -> list[Held]:
    """Neighbours of one shape as one batch, of at most so many numbers: links make several times as many of them."""
    groups: list[list[Held]] = []
    for each in found:
        last = groups[-1] if groups else []
        size = sum(held.moments.covariance.numel() for held in (*last, each))
        if last and size <= most and _shapes(last[0]) == _shapes(each):
            last.append(each)
        else:
            groups.append([each])
    return [_one(group) for group in groups]


def _one(group: list[Held]) -> Held:
    mean, covariance, index = zip(*(moments for moments, _ in group), strict=True)
    some = None if index[0] is None else torch.cat(index)
    return Held(Moments(torch.cat(mean), torch.cat(covariance), some), torch.cat([y for _, y in group]))


def _shapes(held: Held) -> list[Any]:
    return [None if t is None else t.shape[1:] for t in (*held.moments, held.y)]


def _fit_together(nlpd: Callable[[Tensor, Tensor], Tensor], free: Free, start: float) -> tuple[float, Tensor]:
    """The scale and the numbers that are free with it, by L-BFGS over their logarithms from several starts."""
    bounds = [(math.log(BOUNDS[0]), math.log(BOUNDS[1])), *free.bounds]
    form = free.guess(start).shape

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.tensor(theta, requires_grad=True)
        with torch.enable_grad():
            value = nlpd(leaf[0].exp(), leaf[1:].exp().reshape(form))
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.item(), gradient.numpy()

    def initial(scale: float) -> np.ndarray:
        return np.concatenate([[math.log(scale)], free.guess(scale).log().reshape(-1).numpy()])

    # the given scale comes first and wins ties, so that it stays where the data say nothing about it
    others = sorted(map(initial, np.logspace(-6, 6, 25)), key=lambda theta: objective(theta)[0])[:3]
    runs = [minimize(objective, t, jac=True, bounds=bounds, method="L-BFGS-B") for t in (initial(start), *others)]
    best = min(runs, key=lambda run: round(float(run.fun), 10))
    return math.exp(best.x[0]), torch.from_numpy(best.x)[1:].exp().reshape(form)


# -- temperature scaling


def fit_temperature(model: Any, loader: Iterable[Any], start: float, progress: bool = True) -> FitReport:
    """`argmin_T mean -log softmax(logits / T)[y]`; `model` maps inputs to logits."""
    cached = []
    for x, y in batches(loader, taken_by(model), device_of(model), "caching logits" if progress else None):
        with torch.no_grad(), explained(model, x):
            logits = _finite(as_tensor(call(model, x)))
        cached.append((_double(logits), check_labels(y, logits.shape[:-1], logits.shape[-1]).cpu()))
    points = sum(labels.numel() for _, labels in cached)

    def nlpd(temperature: float) -> float:
        return sum(pick((logits / temperature).log_softmax(-1), y).sum().item() for logits, y in cached) / points

    return _report("temperature", nlpd, start, points)


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
    settings: Any = {"bounds": bracket, "method": "bounded", "options": {"xatol": 1e-6}}
    fine: Any = minimize_scalar(lambda t: objective(math.exp(t)), **settings)
    value, best = min((float(fine.fun), float(fine.x)), (float(values[at]), float(grid[at])))
    return math.exp(best) if value < objective(start) - 1e-10 else start


def minimise_together(
    densities: Callable[[Tensor], list[Tensor]], starts: list[Tensor], bounds: list[tuple[float, float]], count: int
) -> Tensor:
    """The positive numbers of least NLPD of `count` targets, by L-BFGS over logarithms, from the best of the starts."""
    form = starts[0].shape
    known: dict[bytes, tuple[float, np.ndarray]] = {}  # the search begins where the starts were compared

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        if theta.tobytes() not in known:
            leaf = torch.tensor(theta, requires_grad=True)
            with torch.enable_grad():
                sums = [each.sum() for each in densities(leaf.exp().reshape(form))]
                value = -torch.stack(sums).sum() / count
            (gradient,) = torch.autograd.grad(value, leaf)
            known[theta.tobytes()] = value.item(), gradient.numpy()
        value, gradient = known[theta.tobytes()]
        return value, gradient.copy()

    logs = [np.clip(start.log().reshape(-1).numpy(), *np.transpose(bounds)) for start in starts]
    values = [np.nan_to_num(objective(theta)[0], nan=math.inf) for theta in logs]
    first = logs[int(np.argmin(values))]
    if not math.isfinite(min(values)):  # there is nothing to follow
        return torch.from_numpy(first).exp().reshape(form)
    settings: Any = {"jac": True, "bounds": bounds, "method": "L-BFGS-B", "options": {"ftol": 1e-13, "gtol": 1e-8}}
    found: Any = minimize(objective, first, **settings)
    return torch.from_numpy(found.x).exp().reshape(form)


def highest_scale(held: HeldOut, most: float) -> float | None:
    """The largest scale at which variances are finite in the type of the latents; None if there are no variances."""
    largest = max(moments.covariance.abs().max().item() for moments, _ in held.batches)
    return min(most, 1e-9 * torch.finfo(held.dtype).max / largest) if largest > 0 else None


def _report(name: str, nlpd: Callable[[float], float], start: float, points: int) -> FitReport:
    nlpd = functools.cache(nlpd)  # the search has looked at both of those that are reported
    best = minimise(nlpd, start)
    return FitReport(name, start, best, nlpd(start), nlpd(best), points)


def latents(
    net: Any, loader: Iterable[Any], progress: bool, likelihood: Likelihood | None = None
) -> Iterable[tuple[Gaussian, Tensor]]:
    """The latents of a net for the batches of a loader, finite, and their targets."""
    for x, y in batches(loader, taken_by(net), device_of(net), "caching latents" if progress else None):
        with torch.no_grad():
            output = call(net, x)
            latent = check_finite(as_latent(output if likelihood is None else likelihood.joined(output)), x)
        yield latent, y


def _finite(mean: Tensor) -> Tensor:
    if not mean.isfinite().all():
        raise InputError("the net returned values that are not finite: check its inputs and its weights")
    return mean


def check_finite(latent: Gaussian, inputs: Any) -> Gaussian:
    """Refuse a latent that overflowed; `inputs` is what it was computed from. Nothing is read while tracing."""
    if torch.compiler.is_compiling():
        return latent
    covariance = latent.covariance if latent.is_full and latent.chosen is None else latent.variance
    try:  # sums are finite only if every entry is, and cost less than asking each
        sound = math.isfinite(latent.mean.sum().item() + covariance.sum().item())
    except RuntimeError:  # values cannot be read under vmap, or from tensors without any
        return latent
    bad = {} if sound else {"mean": ~latent.mean.isfinite(), "variance": ~covariance.isfinite()}
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
    if found.get("mean"):
        text += ", so the model itself is: look for weights that are not finite, and for inputs that it cannot take"
    if tensors:
        text += f". The largest input is {max(t.abs().max().item() for t in tensors):.3g} in size"
    return (
        f"{text}. Variances need squares, which overflow early in {latent.dtype}: rescale or normalise the input, or "
        "use double precision; if the input is of ordinary size, the posterior is so wide that variances overflow "
        "(in a gated MLP two random values are multiplied): use a larger prior precision, or posterior.scale(0.01), "
        "before streamline; or fewer random parameters (posterior.select); or pg.linearise, whose variances grow less"
    )


def _double(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float64)
