"""With Ray Data: a pool of actors, each with the model loaded once, makes the parts.

The rows of the Ray data set are runs of parts, not the data: every actor reads its rows from the files and writes its
parts itself, so nothing large passes through Ray, and what an actor finished before it died stays finished.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from propagauss.errors import InputError
from propagauss.predict.models.loading import load
from propagauss.predict.plan import Part, consecutive
from propagauss.predict.work import Task, Worker

SHARES, MOST = 8, 32  # runs for each worker, if there are parts enough; parts in a run
TRIES = 5  # of a run whose worker dies; Ray itself would try for ever
REMEDY = ": finished parts are kept; run again, with fewer workers or a smaller batch if memory was short"
STORE_BYTES = 1 << 27  # only the list of runs is in it


def run(
    task: Task, parts: Sequence[Part], workers: int | None, address: str | None, tell: Callable[[int], object]
) -> None:
    """Make these parts; `tell` hears of rows as they are done."""
    try:
        import ray
        import ray.data
        import ray.exceptions
    except ImportError as error:
        raise InputError("the engine 'ray' needs the package ray: pip install propagauss[ray]") from error
    threads = task.threads or 1
    with _cluster(ray, workers, threads, address):
        count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        most = min(max(len(parts) // (count * SHARES), 1), MOST)
        runs = [{"parts": json.dumps([part.to_json() for part in each])} for each in consecutive(parts, most)]
        done = ray.data.from_items(runs, override_num_blocks=len(runs)).map_batches(
            Actor,
            batch_size=1,
            num_cpus=threads,
            compute=ray.data.ActorPoolStrategy(size=min(count, len(runs))),
            fn_constructor_args=(task, threads),
        )
        try:
            for row in done.iter_rows():
                if row["error"]:
                    raise _error(json.loads(row["error"]))
                tell(int(row["rows"]))
        except ray.exceptions.RayError as error:
            raise InputError(f"the workers of Ray failed ({_last(error)}){REMEDY}") from error


class Actor:
    """A worker in a process of its own; Ray starts another if it dies, and hands it the run again."""

    def __init__(self, task: Task, threads: int):
        self.worker = Worker(task, load(task.model, threads))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        found = [self._run(stored) for stored in batch["parts"]]
        return {"rows": [rows for rows, _ in found], "error": [error for _, error in found]}

    def _run(self, stored: str) -> tuple[int, str]:
        """Rows of the run, and what went wrong: as text, since a second try would not help."""
        parts = [Part.from_json(part) for part in json.loads(stored)]
        finished = self.worker.store.finished([part.index for part in parts])
        due = [part for part in parts if part.index not in finished]
        if due and self.worker.store.tried(parts[0].index) > TRIES:
            rows = f"rows {due[0].start} to {due[-1].start + due[-1].rows - 1}"
            return 0, json.dumps(["", f"{TRIES} workers died at {rows}{REMEDY}"])
        try:
            for each in consecutive(due):
                for _ in self.worker.run(each):
                    pass
        except InputError as error:
            return 0, json.dumps(["", str(error)])
        except OSError as error:
            return 0, json.dumps([error.errno, error.strerror or str(error)])
        return sum(part.rows for part in parts), ""


def _last(error: Exception) -> str:
    """The line that says what happened, below Ray's account of where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _error(stored: list[Any]) -> Exception:
    number, text = stored
    return InputError(text) if number == "" else OSError(number, text)


@contextmanager
def _cluster(ray: Any, workers: int | None, threads: int, address: str | None) -> Iterator[None]:
    """The cluster at `address` or in RAY_ADDRESS, the one this process is in already, or one of our own; all quiet."""
    ours = not ray.is_initialized()
    if ours:
        address = address or os.environ.get("RAY_ADDRESS")
        own = {
            "num_cpus": workers and workers * threads,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        }
        where = {"address": address} if address else {"address": "local", **own}
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **where)
        except ConnectionError as error:
            remedy = "start it, or set what Ray needs to be let in (RAY_AUTH_MODE)"
            raise InputError(f"no connection to a Ray cluster at {address}: {remedy}") from error
    context = ray.data.DataContext.get_current()
    shown, level = context.enable_progress_bars, logging.getLogger("ray.data").level
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors come as exceptions
    try:
        yield
    finally:
        context.enable_progress_bars = shown
        logging.getLogger("ray.data").setLevel(level)
        if ours:
            ray.shutdown()
