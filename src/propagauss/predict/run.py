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
from propagauss.predict.models.loading import digest, load
from propagauss.predict.options import Options, Summary
from propagauss.predict.plan import Part, default_batch, default_part_rows, divide
from propagauss.predict.reading.data import files, fingerprint
from propagauss.predict.select import select
from propagauss.predict.work import Task, Worker
from propagauss.predict.writing import assemble, receipt
from propagauss.predict.writing.store import Store, key
from propagauss.predict.writing.whole import whole

FORMAT = 2  # of the parts and their manifest


def run(options: Options) -> Summary:
    """Make the output, or go on with it."""
    store = Store(options.folder)
    store.check()
    there = options.out.exists() and not options.overwrite
    if there and store.written() is None and receipt.read(options.out) is None:
        raise _taken(options.out)
    worker, identity = _prepare(options)
    done = _done(worker, options) if there else None
    if done and not options.folder.exists():
        return done
    with worker.store.locked():
        earlier = worker.store.written()
        if earlier and earlier["key"] == worker.store.key and options.out.exists() and not options.restart:
            worker.store.remove()  # it was stopped when all was done but this
            return done or _summary(options.out, earlier["summary"])
        if done:
            return done
        if options.out.exists() and not options.overwrite:
            raise _taken(options.out)
        parts = _parts(worker, identity, options.restart or earlier is not None)
        return _finish(worker, identity, parts, options)


def _done(worker: Worker, options: Options) -> Summary | None:
    """The output that is there, if this very run made it."""
    found = receipt.read(options.out)
    same = found and (found["key"], found["on_nan"]) == (worker.store.key, options.on_nan)
    return _summary(options.out, found["summary"], complete=True) if found and same and not options.restart else None


def _prepare(options: Options) -> tuple[Worker, dict[str, Any]]:
    """Everything that can go wrong before a row is read; and what the parts depend on."""
    model = load(options.model, options.threads)
    paths = files(options.data)
    selection = select(model, paths, options.columns, options.id)
    row_bytes = max(selection.columns.width * selection.columns.dtype.itemsize, 1)
    identity = {
        "format": FORMAT,
        "model": digest(options.model),
        "data": fingerprint(options.data, paths),
        "columns": [selection.columns.inputs, selection.columns.id, selection.shapes],
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
        lists=options.ending == ".parquet",
    )
    worker = Worker(task, model)
    assemble.check(options.out, options.ending, worker.schema)
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
    if not manifest:
        raise _damaged(store)
    differs = _differs(manifest, identity)
    if manifest["on_nan"] not in ("error", on_nan):  # parts made with "error" have no such rows
        differs.append("on-nan")
    if differs:
        raise InputError(
            f"an unfinished run in {store.folder} was of another {' and '.join(differs)}: discard it with --restart, "
            "or give another output"
        )
    try:
        parts = [Part.from_json(part) for part in manifest["parts"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(store) from error
    if manifest["on_nan"] != on_nan:
        store.write_manifest(manifest | {"on_nan": on_nan})
    return parts


def _damaged(store: Store) -> InputError:
    return InputError(
        f"the manifest of an unfinished run in {store.folder} is damaged: discard it with --restart, or give another "
        "output"
    )


def _differs(manifest: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    stored = manifest["identity"]
    return [name for name, value in identity.items() if key({"": stored.get(name)}) != key({"": value})]


def _finish(worker: Worker, identity: dict[str, Any], parts: list[Part], options: Options) -> Summary:
    start, store = time.perf_counter(), worker.store
    finished = store.finished()
    due = [part for part in parts if part.index not in finished]
    total = sum(part.rows for part in parts)
    resumed = total - sum(part.rows for part in due)
    with (
        _kept(store, parts, options.out),
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
        paths, rows = _counted(store, parts, options.on_nan)
        counter = assemble.Counter(worker.schema)
        batches = counter.counted(store.batches(paths))

        def found() -> dict[str, Any]:
            columns = worker.task.selection.columns.inputs
            counts = {"rows": rows, "skipped": total - rows, "without": counter.without}
            return {"columns": columns, "files": len(worker.task.paths), **counts}

        with whole(store.assembled) as file:
            slip = receipt.entry(store.key, options.on_nan, found)
            assemble.write(file, options.ending, worker.schema, batches, slip)
        if counter.rows != rows:
            raise InputError(f"parts in {store.folder} changed while they were put together: run the same again")
        receipt.write(options.out, store.assembled, slip())
        summary = found() | {"resumed": resumed, "seconds": time.perf_counter() - start}
        store.publish(options.out, summary)
    return _summary(options.out, summary)


def _summary(out: Path, found: dict[str, Any], complete: bool = False) -> Summary:
    return Summary(
        out,
        tuple(found["columns"]),
        found["rows"],
        found["skipped"],
        found.get("resumed", 0),
        found.get("seconds", 0.0),
        found["files"],
        found["without"],
        complete,
    )


def _counted(store: Store, parts: list[Part], on_nan: str) -> tuple[list[Path], int]:
    """Files and rows of the output; every part is there, with as many as it should have."""
    finished, total, paths = store.finished(), 0, []
    for part in parts:
        path, rows = finished.get(part.index, (None, -1))
        if path is None or rows > part.rows or (rows < part.rows and on_nan != "skip"):
            raise InputError(
                f"part {part.index} in {store.folder} is missing or damaged: run the same again to make it anew"
            )
        total += rows
        paths.append(path)
    return paths, total


@contextmanager
def _kept(store: Store, parts: list[Part], out: Path) -> Iterator[None]:
    """A full disk, or whatever else keeps us from writing, with what to do about it."""
    try:
        yield
    except OSError as error:
        done = len(store.parts().keys() & {part.index for part in parts})
        reason = f"{error.strerror or error}; {done} of {len(parts)} parts are kept, run the same again to go on"
        raise OSError(error.errno, reason, str(out)) from error


def _taken(out: Path) -> InputError:
    return InputError(f"{out} exists: give another output, or --overwrite")
