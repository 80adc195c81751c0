"""A temperature `T` after a link, as a number that calibration can fit: `p_c^(1/T) / Σ_j p_j^(1/T)`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from propagauss.likelihoods.base import Free, Likelihood, bounds_beside

TEMPERATURES = (math.log(1e-3), math.log(1e3))
LEAST = -1e18  # logarithm of a probability that counts as zero; its square is finite in single precision
FLAT = 1e-9  # a derivative of the mean loss, in the logarithm of the temperature, that is none


class Gaps(NamedTuple):
    """`g_c = log p_c - log p_y`: what the link gave to each class, against the label that was seen.

    Classes are first, since PyTorch takes several times as long for a softmax over a last dimension that is short.
    """

    values: Tensor  # [C, ...]; zero where the label does not count
    counted: Tensor  # [...]


class Tempered:
    """`-log p_y = log Σ_c exp(β g_c)`, `β = 1/T`: convex in `β`, with derivatives `E[g]` and `Var[g]` under the `p_c`.

    The link's probabilities are at one scale of the latent, and do not depend on the temperature.
    """

    def __init__(self, batches: list[Gaps]):
        self._batches = batches

    def densities(self, temperature: Tensor) -> list[Tensor]:
        """`log p_y` by batch; 0 for labels that do not count."""
        return [-torch.where(each.counted, (each.values / temperature).logsumexp(0), 0.0) for each in self._batches]

    def best(self, starts: list[Tensor], bounds: tuple[float, float], count: int) -> Tensor:
        """The temperature of least mean loss over `count` labels."""
        return minimise_convex(self.derivatives, starts, bounds, count)

    def derivatives(self, inverse: float) -> tuple[float, float]:
        """The first and the second of `-Σ log p_y` in `β`."""
        first = second = 0.0
        for gaps, _ in self._batches:
            weighted = (gaps * inverse).softmax(0) * gaps
            mean = weighted.sum(0)
            first += mean.sum().item()
            second += (weighted * gaps).sum().item() - mean.square().sum().item()
        return first, second


def minimise_convex(
    derivatives: Callable[[float], tuple[float, float]], starts: list[Tensor], bounds: tuple[float, float], count: int
) -> Tensor:
    """The positive number in whose inverse a sum over `count` terms is convex, and least.

    `derivatives` are the first two in the inverse, `bounds` those of the number's logarithm. Newton's method, with a
    bisection wherever it would leave the bracket, from the last of the starts; one at which nothing changes is kept.
    """
    low, high = math.exp(-bounds[1]), math.exp(-bounds[0])

    def at(inverse: float) -> tuple[float, float, bool]:
        """Derivatives, and whether they leave nothing to follow."""
        first, second = derivatives(inverse)
        return first, second, not abs(first * inverse) > FLAT * count or not math.isfinite(first)

    inverse, first, second = 1.0, 0.0, 0.0
    for start in starts:
        inverse = min(max(1 / start.item(), low), high)
        first, second, done = at(inverse)
        if done:
            return torch.full_like(starts[0], 1 / inverse)
    end = high if first < 0 else low
    if at(end)[0] * first >= 0:  # it falls all the way to the end of the range
        return torch.full_like(starts[0], 1 / end)
    while high / low > 1 + FLAT:
        low, high = (inverse, high) if first < 0 else (low, inverse)
        step = inverse - first / second if second > 0 else 0.0
        inverse = step if low < step < high else math.sqrt(low * high)
        first, second, done = at(inverse)
        if done:
            break
    return torch.full_like(starts[0], 1 / inverse)


def gaps(log_probs: Tensor, labels: Tensor, counted: Tensor) -> Gaps:
    """`log_probs [..., C]`, `labels [...]`; what the labels are that do not count does not matter.

    A probability may be zero: of another class, it stays so; of the label, the loss is infinite.
    """
    seen = log_probs.gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1))
    values = torch.where(log_probs == seen, 0.0, log_probs - seen).clamp(min=LEAST)
    return Gaps(values.masked_fill(~counted.unsqueeze(-1), 0.0).movedim(-1, 0).contiguous(), counted)


def free_temperature(replaced: Callable[[Tensor], Likelihood], at_scale: Callable[[float], Tempered]) -> Free:
    """A temperature after the link; beside a latent variance it stays above a half, see `bounds_beside`."""
    start = torch.ones((), dtype=torch.float64)
    beside = bounds_beside(0.5, [TEMPERATURES])
    return Free("temperature", [TEMPERATURES], lambda scale: start, replaced, at_scale, beside)
