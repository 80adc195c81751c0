"""Times several functions against one of them, in a way that a busy or throttled machine disturbs little.

Seconds differ between machines and between minutes on one machine; ratios within a moment do not. So every *round* runs
one *block* of each method, in random order, and a block is compared with the plain model's block of the same round. A
block is as many warm repeats as fill a target time (at least one). The result is the median of the ratios over all
rounds, with their 10th and 90th percentile. Methods too slow for that get fewer rounds, evenly over the run.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from statistics import median, quantiles
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.case import Predict


@dataclass(frozen=True)
class Settings:
    rounds: int = 60
    block: float = 0.03  # target seconds per block
    budget: float = 6.0  # seconds per method, beyond which it gets fewer rounds
    least: int = 3  # rounds that every method gets, however slow
    seed: int = 0


QUICK = Settings(rounds=15, block=0.015, budget=0.5, least=1)


@dataclass(frozen=True)
class Timing:
    ratio: float
    low: float  # 10th percentile of the ratios
    high: float  # 90th
    rounds: int
    repeats: int  # calls in a block
    seconds: float  # median per call, for orientation only


@dataclass(frozen=True)
class Subject:
    predict: Predict
    x: Any
    needs_grad: bool = False

    def seconds(self, calls: int) -> float:
        """Duration of so many calls."""
        predict, x = self.predict, self.x
        with torch.set_grad_enabled(self.needs_grad):
            start = time.perf_counter()
            for _ in repeat(None, calls):
                predict(x)
            return time.perf_counter() - start

    def once(self) -> Any:
        with torch.set_grad_enabled(self.needs_grad):
            return self.predict(self.x)


def measure(
    subjects: Mapping[str, Subject], plain: str, settings: Settings, title: str | None = None
) -> dict[str, Timing]:
    """Ratios of every subject to the subject named `plain`, on one thread."""
    with _one_thread():
        per_call = {name: _warm_up(s, settings.block) for name, s in subjects.items()}
        repeats = {name: max(1, round(settings.block / t)) for name, t in per_call.items()}
        rounds = {name: _rounds(per_call[name] * repeats[name], settings) for name in subjects}
        rounds[plain] = settings.rounds
        blocks = _run(subjects, repeats, rounds, settings, title)
    typical = median(blocks[plain].values())
    return {
        name: _timing(
            [t / (typical if name == plain else blocks[plain][at]) for at, t in times.items()],
            list(times.values()),
            repeats[name],
        )
        for name, times in blocks.items()
    }


def _run(
    subjects: Mapping[str, Subject],
    repeats: Mapping[str, int],
    rounds: Mapping[str, int],
    settings: Settings,
    title: str | None,
) -> dict[str, dict[int, float]]:
    """Seconds per call of every block, by method and round."""
    shuffle = random.Random(settings.seed).shuffle
    blocks: dict[str, dict[int, float]] = {name: {} for name in subjects}
    with tqdm(total=sum(rounds.values()), desc=title, leave=False, disable=None) as progress:
        for at in range(settings.rounds):
            due = [name for name in subjects if _is_due(at, rounds[name], settings.rounds)]
            shuffle(due)
            for name in due:
                if repeats[name] > 1:
                    subjects[name].once()  # the other methods have used the caches since
                blocks[name][at] = subjects[name].seconds(repeats[name]) / repeats[name]
                if blocks[name][at] > 0.1:
                    gc.collect()  # slow methods may leave large tensors in reference cycles
                progress.update()
    return blocks


def _is_due(at: int, count: int, total: int) -> bool:
    """Distributes `count` turns evenly over `total` rounds."""
    return (at + 1) * count // total > at * count // total


def _rounds(block: float, settings: Settings) -> int:
    return max(min(settings.least, settings.rounds), min(settings.rounds, int(settings.budget / block)))


def _warm_up(subject: Subject, target: float) -> float:
    """Runs a subject until it is warm; its seconds per call."""
    first = subject.seconds(1)
    if first > 1:  # too slow to run more often than needed; the estimate only sets the number of rounds
        return first
    estimate = subject.seconds(1)
    calls = math.ceil(target / max(estimate, 1e-7))
    return subject.seconds(calls) / calls if calls > 1 else estimate


def _timing(ratios: list[float], times: list[float], repeats: int) -> Timing:
    low, high = (ratios[0], ratios[0])
    if len(ratios) > 1:
        deciles = quantiles(ratios, n=10, method="inclusive")
        low, high = deciles[0], deciles[-1]
    return Timing(median(ratios), low, high, len(ratios), repeats, median(times))


@contextmanager
def _one_thread() -> Any:
    """One thread, and no garbage collector that happens to run in one method's block."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
