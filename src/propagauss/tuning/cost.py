"""What a way to predict costs: time and memory, as ratios to the plain model's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from propagauss.demo.timing import relative_times
from propagauss.inputs import call

ROUNDS = 5


@torch.no_grad()
def cost(net: Any, model: nn.Module, x: Any, budget: float) -> float:
    """Time of `net(x)` over that of `model(x)`, interleaved; measured once only if that is far beyond the budget."""
    # the time of this process alone, where it has one thread: other programs would be counted as well
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    plain, other = _seconds(model, x, clock), _seconds(net, x, clock)
    if other > 3 * budget * plain and other > 0.1:
        return other / plain
    calls = {"plain": lambda: call(model, x), "other": lambda: call(net, x)}
    ratios, _ = relative_times(calls, "plain", ROUNDS, block=5e-3, clock=clock)
    return ratios["other"].median


def memory(net: nn.Module, model: nn.Module) -> float:
    """Bytes of parameters and buffers over those of the model."""
    return _bytes(net) / max(_bytes(model), 1)


def _seconds(net: Any, x: Any, clock: Callable[[], float]) -> float:
    call(net, x)  # warm
    start = clock()
    call(net, x)
    return max(clock() - start, 1e-6)


def _bytes(module: nn.Module) -> int:
    tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers()) if t.numel()}
    return sum(t.numel() * t.element_size() for t in tensors.values())
