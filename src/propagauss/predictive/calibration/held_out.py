"""The latents of held-out data: computed once, finite, and kept in double precision beside their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.checks import flag
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, batches, call, device_of, taken_by
from propagauss.likelihoods.base import Held, Likelihood, Moments

TOGETHER = 2**18  # variances or covariances in one batch of cached latents


class HeldOut(NamedTuple):
    """The latents of held-out data in double precision, in as few batches as memory allows, and what they were."""

    batches: list[Held]
    points: int
    targets: int
    dtype: torch.dtype  # of the latents themselves

    @staticmethod
    def of(batches: list[Held], likelihood: Likelihood, dtype: torch.dtype) -> HeldOut:
        points, targets = (sum(count(y) for _, y in batches) for count in (likelihood.points, likelihood.count))
        require_targets(targets)
        return HeldOut(batches, points, targets, dtype)


def require_targets(count: int) -> None:
    if not count:
        raise InputError("no target of the loader counts, all labels are -100: give data with labels")


def cache(net: Any, loader: Iterable[Any], likelihood: Likelihood, progress: bool) -> HeldOut:
    """Run the net over the data once."""
    return held_out(latents(net, loader, flag(progress, "progress"), likelihood), likelihood)


def held_out(pairs: Iterable[tuple[Gaussian, Tensor]], likelihood: Likelihood) -> HeldOut:
    """Latents and targets, as the likelihood asks for them."""
    found: list[Held] = []
    dtype = torch.float64
    for latent, y in pairs:
        targets, dtype = likelihood.targets(y.to(latent.device), latent.shape), latent.dtype
        found.append(Held(likelihood.moments(latent).map(as_double), targets.detach().cpu()))
    return HeldOut.of(_joined(found, math.inf if likelihood.pointwise else TOGETHER), likelihood, dtype)


def latents(
    net: Any, loader: Iterable[Any], progress: bool, likelihood: Likelihood | None = None
) -> Iterable[tuple[Gaussian, Tensor]]:
    """The latents of a net for the batches of a loader, finite, and their targets."""
    for x, y in batches(loader, taken_by(net), device_of(net), "caching latents" if progress else None):
        with torch.no_grad():
            output = call(net, x)
            latent = check_finite(as_latent(output if likelihood is None else likelihood.joined(output)), x)
        yield latent, y


def highest_scale(held: HeldOut, most: float) -> float | None:
    """The largest scale at which variances are finite in the type of the latents; None if there are no variances."""
    largest = max(moments.covariance.abs().max().item() for moments, _ in held.batches)
    return min(most, 1e-9 * torch.finfo(held.dtype).max / largest) if largest > 0 else None


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


def as_double(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.float64)


# -- what overflowed


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
