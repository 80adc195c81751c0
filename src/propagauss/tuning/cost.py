"""What a way to predict costs: time and memory, as ratios to the plain model's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from propagauss.demo.timing import relative_times
from propagauss.inputs import call

ROUNDS = 5
LEAST = 1e-3  # seconds; a plain forward pass that takes less is all overhead, and counts as this much


@dataclass(frozen=True)
class Cost:
    """How long a network takes."""

    ratio: float  # to a plain forward pass
    plain: float  # seconds of that

    def exceeds(self, budget: float) -> bool:
        """Whether it is over the budget, where a plain pass counts as a millisecond at least."""
        return self.ratio * self.plain > budget * max(self.plain, LEAST)


@torch.no_grad()
def cost(net: Any, model: nn.Module, few: Any, many: Any, budget: float) -> Cost:
    """Time of `net(many)` over that of `model(many)`, interleaved; of `few` if that is far beyond the budget."""
    # the time of this process alone, where it has one thread: other programs would be counted as well
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    for x in (few, many):
        plain = _seconds(model, x, clock)
        far = max(3 * budget * max(plain, LEAST), 0.1)
        other = _seconds(net, x, clock, 10 * far)
        if other > far:
            return Cost(other / plain, plain)
    calls = {"plain": lambda: call(model, many), "other": lambda: call(net, many)}
    ratios, plain = relative_times(calls, "plain", ROUNDS, block=5e-3, clock=clock)
    return Cost(ratios["other"].median, plain)


def batch_of(x: Any, rows: int, size: int) -> Any:
    """A batch of `size` inputs from one of `rows`: some of them, or all of them several times."""

    def resized(t: Tensor) -> Tensor:
        if t.dim() == 0 or t.shape[0] != rows:
            return t  # something that all inputs share
        return t[torch.arange(size, device=t.device) % rows]

    return pytree.tree_map_only(Tensor, resized, x)


def memory(net: nn.Module, model: nn.Module) -> float:
    """Bytes of parameters and buffers over those of the model."""
    return _bytes(net) / max(_bytes(model), 1)


def _seconds(net: Any, x: Any, clock: Callable[[], float], most: float = math.inf) -> float:
    """Of the second call; of the first, which has more to do, if that takes longer than `most`."""

    def timed() -> float:
        start = clock()
        call(net, x)
        return max(clock() - start, 1e-6)

    first = timed()
    return first if first > most else timed()


def _bytes(module: nn.Module) -> int:
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers()) if t.numel()}
    return sum(t.numel() * t.element_size() for t in tensors.values())
