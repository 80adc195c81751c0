"""How much longer one call takes than another, on a machine that does other things as well."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """Time relative to the reference: median and quartiles over rounds."""

    median: float
    low: float
    high: float


def relative_times(
    calls: dict[str, Callable[[], Any]],
    reference: str,
    rounds: int,
    seed: int = 0,
    block: float = 3e-3,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Ratio], float]:
    """Time of each call over that of `reference`, and the seconds of the reference itself.

    In every round each call runs in a block of warm repeats that fill `block` seconds, the blocks in random order; one
    that fills a block alone is not warmed up for each. Ratios are taken within a round, so that what slows the machine
    for longer than a round cancels.
    Where one thread does all the work, `time.process_time` as `clock` leaves out what other programs take.
    """
    repeats = {name: max(1, round(block / _seconds(call, 1, clock))) for name, call in calls.items()}
    order, shuffle = list(calls), random.Random(seed).shuffle
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            measured[name].append(_seconds(calls[name], repeats[name], clock, warmed=repeats[name] == 1))
    base = measured[reference]
    ratios = {name: _summary([t / b for t, b in zip(times, base, strict=True)]) for name, times in measured.items()}
    return ratios, statistics.median(base)


def _seconds(call: Callable[[], Any], repeats: int, clock: Callable[[], float], warmed: bool = False) -> float:
    if not warmed:
        call()
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def _summary(values: list[float]) -> Ratio:
    if len(values) < 2:
        return Ratio(values[0], values[0], values[0])
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(statistics.median(values), low, high)
