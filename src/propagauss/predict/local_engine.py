"""In this process: one pass over the data, as many threads as the model's runtime takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from propagauss.predict.plan import Part, consecutive
from propagauss.predict.work import Worker


def run(worker: Worker, parts: Sequence[Part], tell: Callable[[int], object]) -> None:
    """Make these parts; `tell` hears of rows as they are done."""
    for each in consecutive(parts):
        for _ in worker.run(each, tell):
            pass
