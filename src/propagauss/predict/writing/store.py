"""Finished parts on disk: a folder beside the output, a manifest that says of what, and the output made of them.

A file gets its name only when all of it is on the disk, so whatever has a name is whole, wherever a run was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from propagauss.errors import InputError

MANIFEST, WRITTEN, LOCK = "manifest.json", "written.json", "lock"


class Store:
    """The folder of the parts of one output."""

    def __init__(self, folder: Path, key: str = ""):
        self.folder, self.key = folder, key

    def part(self, index: int) -> Path:
        # the key keeps out what a worker of a run since discarded may still write
        return self.folder / f"{self.key}-{index:07d}.arrow"

    def rows(self, index: int) -> int | None:
        """In a finished part; None if it is not finished, or damaged."""
        try:
            with pa.memory_map(str(self.part(index))) as file:
                found = pa.ipc.open_file(file)
                return sum(found.get_batch(i).num_rows for i in range(found.num_record_batches))
        except (OSError, pa.ArrowInvalid):
            return None

    def write(self, index: int, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """A part, of rows as they come; how many there were."""
        rows = 0
        with whole(self.part(index)) as file, pa.ipc.new_file(file, schema) as sink:
            for batch in batches:
                sink.write_batch(batch)
                rows += batch.num_rows
        return rows

    def batches(self, indices: Iterable[int]) -> Iterator[pa.RecordBatch]:
        """What the parts hold, one after the other."""
        for index in indices:
            with pa.memory_map(str(self.part(index))) as file:
                found = pa.ipc.open_file(file)
                yield from (found.get_batch(i) for i in range(found.num_record_batches))

    def tried(self, index: int) -> int:
        """How often this was asked in this run of the program, by workers that may have died since."""
        path = self.folder / f"{self.key}-{index:07d}.tried"
        with path.open("ab") as file:
            file.write(b".")
        return path.stat().st_size

    def manifest(self) -> dict[str, Any] | None:
        return _json(self.folder / MANIFEST)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        with whole(self.folder / MANIFEST) as file:
            file.write(json.dumps(manifest).encode())

    def written(self) -> dict[str, Any] | None:
        """What was said of an output, if it was put in its place and only the parts are still to be removed."""
        return None if self.assembled.exists() else _json(self.folder / WRITTEN)

    @property
    def assembled(self) -> Path:
        """The output before it is put in its place."""
        return self.folder / "output"

    def publish(self, out: Path, summary: dict[str, Any]) -> None:
        """Put the assembled output in its place, and remove the parts."""
        with whole(self.folder / WRITTEN) as file:
            file.write(json.dumps({"key": self.key, "summary": summary}).encode())
        os.replace(self.assembled, out)
        _sync_folder(out.parent)
        self.remove()

    def clear(self) -> None:
        """Discard what is there, the manifest first: without it nothing else counts."""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name != MANIFEST):
            if path.name != LOCK:
                path.unlink()

    def remove(self) -> None:
        """The whole folder; last what says that the output is in its place."""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name in (WRITTEN, LOCK)):
            path.unlink()
        self.folder.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held by one run at a time, and let go when its process ends, however it ends."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / LOCK).open("w") as file:
            _lock(file, self.folder)
            for path in (*self.folder.glob(".*.tmp"), *self.folder.glob("*.tried")):
                path.unlink()
            try:
                yield
            finally:
                if self.folder.exists() and self.manifest() is None:
                    self.remove()


def key(identity: dict[str, Any]) -> str:
    """A name for parts made of the same things in the same way."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there only when all of it is: written under another name, forced to the disk, renamed."""
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _lock(file: IO[str], folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(f"another run is at work on {folder}: wait for it, or give another output") from error
    except OSError:  # not on this file system
        return
