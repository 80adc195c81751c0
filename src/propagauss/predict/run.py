"""One run from beginning to end: what is there is checked, missing parts are made, the output is put together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from propagauss.errors import InputError
from propagauss.predict import local_engine, ray_engine
from propagauss.predict.model import digest, load
from propagauss.predict.options import Options, Summary
from propagauss.predict.plan import Part, default_batch, default_part_rows, divide
from propagauss.predict.reading.data import files, fingerprint
from propagauss.predict.select import select
from propagauss.predict.work import Task, Worker
from propagauss.predict.writing import assemble
from propagauss.predict.writing.store import Store, key, whole

FORMAT = 1  # of the parts and their manifest


def run(options: Options) -> Summary:
    """Make the output, or go on with it."""
    store = Store(options.folder)
    if options.out.exists() and not options.overwrite and store.written() is None:
        raise _taken(options.out)
    worker, identity = _prepare(options)
    with worker.store.locked():
        earlier = worker.store.written()
        if earlier and earlier["key"] == worker.store.key and options.out.exists() and not options.restart:
            worker.store.remove()  # it was stopped when all was done but this
            return _summary(options.out, earlier["summary"])
        if options.out.exists() and not options.overwrite:
            raise _taken(options.out)
        parts = _parts(worker, identity, options.restart or earlier is not None)
        return _finish(worker, identity, parts, options)


def _prepare(options: Options) -> tuple[Worker, dict[str, Any]]:
    """Everything that can go wrong before a row is read; and what the parts depend on."""
    model = load(options.model, options.threads)
    paths = files(options.data)
    selection = select(model, paths, options.columns, options.id)
    row_bytes = selection.columns.width * selection.columns.dtype.itemsize
    identity = {
        "format": FORMAT,
        "model": digest(options.model),
        "data": fingerprint(options.data, paths),
        "columns": [selection.columns.inputs, selection.columns.id, selection.shape],
        "part rows": options.part_rows or default_part_rows(paths, row_bytes),
    }
    task = Task(
        options.model,
        options.threads,
        paths,
        selection,
        options.batch or default_batch(row_bytes),
        options.on_nan,
        options.folder,
        key(identity),
        lists=options.out.suffix == ".parquet",
    )
    worker = Worker(task, model)
    assemble.check(options.out, worker.schema)
    return worker, identity


def _parts(worker: Worker, identity: dict[str, Any], discard: bool) -> list[Part]:
    """All parts: those of the manifest if there is one, of the data otherwise."""
    store, on_nan = worker.store, worker.task.on_nan
    manifest = store.manifest()
    if discard or manifest is None:
        store.clear()
        parts = divide(worker.task.paths, identity["part rows"])
        manifest = {"identity": identity, "on_nan": on_nan, "parts": [part.to_json() for part in parts]}
        store.write_manifest(manifest)
        return parts
    differs = _differs(store, identity)
    if manifest["on_nan"] not in ("error", on_nan):  # parts made with "error" have no such rows
        differs.append("on-nan")
    if differs:
        raise InputError(
            f"an unfinished run in {store.folder} was of another {' and '.join(differs)}: discard it with --restart, "
            "or give another output"
        )
    if manifest["on_nan"] != on_nan:
        store.write_manifest(manifest | {"on_nan": on_nan})
    return [Part.from_json(part) for part in manifest["parts"]]


def _differs(store: Store, identity: dict[str, Any]) -> list[str]:
    stored = (store.manifest() or {}).get("identity", {})
    return [name for name, value in identity.items() if key({"": stored.get(name)}) != key({"": value})]


def _finish(worker: Worker, identity: dict[str, Any], parts: list[Part], options: Options) -> Summary:
    start = time.perf_counter()
    due = [part for part in parts if worker.store.rows(part.index) is None]
    total = sum(part.rows for part in parts)
    resumed = total - sum(part.rows for part in due)
    with (
        _kept(worker.store, parts, options.out),
        tqdm(
            total=total, initial=resumed, unit=" rows", unit_scale=True, disable=None if options.progress else True
        ) as bar,
    ):
        if options.engine == "local" or not due:
            local_engine.run(worker, due, bar.update)
        else:
            ray_engine.run(worker.task, due, options.workers, options.address, bar.update)
        if fingerprint(options.data, files(options.data)) != identity["data"]:
            raise InputError(f"the data at {options.data} was changed while it was read: use --restart")
        rows = _counted(worker.store, parts, options.on_nan)
        indices = [part.index for part in parts]
        with whole(worker.store.assembled) as file:
            assemble.write(file, options.out.suffix, worker.schema, worker.store.batches(indices))
        found = {
            "columns": worker.task.selection.columns.inputs,
            "rows": rows,
            "skipped": total - rows,
            "resumed": resumed,
            "seconds": time.perf_counter() - start,
        }
        worker.store.publish(options.out, found)
    return _summary(options.out, found)


def _summary(out: Path, found: dict[str, Any]) -> Summary:
    return Summary(out, tuple(found["columns"]), found["rows"], found["skipped"], found["resumed"], found["seconds"])


def _counted(store: Store, parts: list[Part], on_nan: str) -> int:
    """Rows of the output; every part is there, with as many as it should have."""
    total = 0
    for part in parts:
        rows = store.rows(part.index)
        if rows is None or rows > part.rows or (rows < part.rows and on_nan != "skip"):
            raise InputError(f"{store.part(part.index)} is missing or damaged: remove it and run the same again")
        total += rows
    return total


@contextmanager
def _kept(store: Store, parts: list[Part], out: Path) -> Iterator[None]:
    """A full disk, or whatever else keeps us from writing, with what to do about it."""
    try:
        yield
    except OSError as error:
        done = sum(store.part(part.index).exists() for part in parts)
        reason = f"{error.strerror or error}; {done} of {len(parts)} parts are kept, run the same again to go on"
        raise OSError(error.errno, reason, str(out)) from error


def _taken(out: Path) -> InputError:
    return InputError(f"{out} exists: give another output, or --overwrite")
