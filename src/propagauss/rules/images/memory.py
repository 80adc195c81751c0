"""Refuse convolutions whose joint covariance cannot fit in memory, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from propagauss.errors import InputError
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.kronecker import KroneckerPosterior
from propagauss.posteriors.laplace.curvature import require_memory
from propagauss.rules.images.patches import Layout, convolve
from propagauss.rules.kernels import Kernels


@dataclass(frozen=True)
class Sizes:
    """Of a convolution on one sample."""

    layout: Layout
    inputs: int
    outputs: int
    places: int

    @property
    def patch(self) -> int:
        return self.layout.groups * self.layout.width


# numbers alive at once for the noise of a random weight on a random input
NOISE_NUMBERS: Kernels[int] = Kernels()


@NOISE_NUMBERS.add("full", DiagonalPosterior)
def _independent(sizes: Sizes) -> int:
    return sizes.places**2 * sizes.patch


@NOISE_NUMBERS.add("full", KroneckerPosterior)
def _kronecker(sizes: Sizes) -> int | None:
    if sizes.layout.transposed:
        return None
    return 2 * sizes.inputs * sizes.places * sizes.patch + 2 * sizes.layout.groups * sizes.places**2 * sizes.patch


@NOISE_NUMBERS.add("full", Posterior)
def _joint(sizes: Sizes) -> int:
    return 2 * (sizes.places * sizes.patch) ** 2


def require_memory_for_maps(
    kind: type | None, layout: Layout, entry: torch.Size, frames: int, random_input: bool, weight: Tensor
) -> None:
    """Refuse a map whose joint covariance cannot fit, from the sizes of one sample; `kind` is that of a random weight's
    posterior.
    """
    probe = torch.empty((1, *entry), device="meta")
    result = convolve(probe, torch.empty(layout.shape, device="meta"), None, layout.settings).shape[1:]
    sizes = Sizes(layout, frames * entry.numel(), frames * result.numel(), frames * result[1:].numel())
    numbers = 3 * sizes.outputs**2
    if random_input:
        numbers += sizes.inputs * (sizes.inputs + sizes.outputs)
        numbers += 0 if kind is None else NOISE_NUMBERS.of("full", kind, sizes)
    shape = " x ".join(map(str, result))
    refuse(
        numbers * weight.element_size(),
        f"the joint covariance of the {shape} outputs of a convolution (kernel {tuple(layout.shape)})",
        "use covariance='diagonal', or make only parameters random that come after the large maps",
        weight.device,
    )


def refuse(needed: int, what: str, remedy: str, device: torch.device) -> None:
    """An error that says what to do, if so many bytes are not to be had."""
    try:
        require_memory(needed, what, device)
    except InputError:
        raise InputError(
            f"{what} needs about {needed / 1e9:.3g} GB for a single sample, more than this machine has: {remedy}"
        ) from None
