"""Finished parts on disk: a folder beside the output, a manifest that says of what, and the output made of them.

A file gets its name only when all of it is written, so whatever has a name is whole, wherever a run was stopped. The
name of a part holds a checksum of its bytes, rows and number: one that was damaged, by a power cut for instance, or is
another one, is made again. Files that are not ours are left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from propagauss.errors import InputError
from propagauss.predict.writing.whole import renamed, sync_folder, whole

MANIFEST, WRITTEN, LOCK, OUTPUT, NOTE = "manifest.json", "written.json", "lock", "output", "note"
PART = re.compile(r"([0-9a-f]{12}-([0-9]{7,})-([0-9]+))-([0-9a-f]{16})\.arrow")
OURS = re.compile(
    rf"{PART.pattern}|manifest\.json|written\.json|lock|output|note|[0-9a-f]{{12}}-[0-9]{{7,}}\.tried|\.[\w.-]+\.[0-9a-f]{{12}}\.tmp"
)
LEFTOVER = re.compile(r"[0-9a-f]{12}-[0-9]{7,}\.tried|\.[\w.-]+\.[0-9a-f]{12}\.tmp")


class Store:
    """The folder of the parts of one output."""

    def __init__(self, folder: Path, key: str = ""):
        self.folder, self.key = folder, key
        self._written: dict[Path, tuple[int, ...]] = {}  # files of this process, which it need not read again

    def parts(self) -> dict[int, list[Path]]:
        """Files that claim to be parts of this run, by their numbers."""
        # the key keeps out what a worker of a run since discarded may still write
        found: dict[int, list[Path]] = {}
        for path in sorted(self.folder.glob(f"{self.key}-*.arrow")):
            if (name := PART.fullmatch(path.name)) and _is_ours(path):
                found.setdefault(int(name[2]), []).append(path)
        return found

    def finished(self, indices: Iterable[int] | None = None) -> dict[int, tuple[Path, int]]:
        """Parts that are whole, and theirs: file and rows by number."""
        there = self.parts()
        found = {}
        for index in there if indices is None else indices:
            for path in there.get(index, []):
                name = PART.fullmatch(path.name)
                if name and (self._written.get(path) == _state(path) or _checksum(name[1], path) == name[4]):
                    found[index] = (path, int(name[3]))
        return found

    def write(self, index: int, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
        """A part, of rows as they come; how many there were."""
        rows = 0
        with renamed(self.folder, f"{self.key}-{index:07d}") as file:
            with pa.OSFile(str(file.path), "wb") as stream, pa.ipc.new_file(stream, schema) as sink:
                for batch in batches:
                    sink.write_batch(batch)
                    rows += batch.num_rows
            name = f"{self.key}-{index:07d}-{rows}"
            file.name = f"{name}-{_checksum(name, file.path)}.arrow"
        self._written[self.folder / file.name] = _state(self.folder / file.name)
        return rows

    def batches(self, paths: Iterable[Path]) -> Iterator[pa.RecordBatch]:
        """What the parts hold, one after the other."""
        for path in paths:
            with pa.OSFile(str(path)) as file:  # not mapped: a file that is cut short must not end the process
                found = pa.ipc.open_file(file)
                yield from (found.get_batch(i) for i in range(found.num_record_batches))

    def tried(self, index: int) -> int:
        """How often this was asked in this run of the program, by workers that may have died since."""
        path = self.folder / f"{self.key}-{index:07d}.tried"
        with path.open("ab") as file:
            file.write(b".")
        return path.stat().st_size

    def manifest(self) -> dict[str, Any] | None:
        """What is written there; `{}` if it is nothing of ours."""
        return _json(self.folder / MANIFEST, {"identity": dict, "on_nan": str, "parts": list})

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        with whole(self.folder / MANIFEST) as file:
            file.write(json.dumps(manifest).encode())

    def written(self) -> dict[str, Any] | None:
        """What was said of an output, if it was put in its place and only the parts are still to be removed."""
        return None if self.assembled.exists() else _json(self.folder / WRITTEN, {"key": str, "summary": dict}) or None

    @property
    def assembled(self) -> Path:
        """The output before it is put in its place."""
        return self.folder / OUTPUT

    def publish(self, out: Path, summary: dict[str, Any]) -> None:
        """Put the assembled output in its place, and remove the parts."""
        with whole(self.folder / WRITTEN) as file:
            file.write(json.dumps({"key": self.key, "summary": summary}).encode())
        os.replace(self.assembled, out)
        sync_folder(out.parent)
        self.remove()

    def clear(self) -> None:
        """Discard what is there and ours, the manifest first: without it nothing else counts."""
        for path in sorted(self._ours(), key=lambda path: path.name != MANIFEST):
            if path.name != LOCK:
                path.unlink()

    def remove(self) -> None:
        """The whole folder, unless something else is in it; last what says that the output is in its place."""
        for path in sorted(self._ours(), key=lambda path: path.name in (WRITTEN, LOCK)):
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _ours(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if OURS.fullmatch(path.name) and _is_ours(path)]

    def check(self) -> None:
        """Refuse a folder that someone else put there."""
        if self.folder.is_symlink():
            raise InputError(f"{self.folder}, where parts are kept, is a link: remove it, or give another output")
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}, where parts are kept, is not a folder: remove it, or give another output")
        for name in (MANIFEST, WRITTEN, LOCK, OUTPUT, NOTE):
            path = self.folder / name
            if os.path.lexists(path) and not _is_ours(path):
                raise InputError(f"{path} is {_odd(path)}: remove it, or give another output")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held by one run at a time, and let go when its process ends, however it ends."""
        self.check()
        self.folder.mkdir(exist_ok=True)
        with _open_lock(self.folder / LOCK) as file:
            _lock(file, self.folder)
            for path in self._ours():
                if LEFTOVER.fullmatch(path.name):
                    path.unlink()
            try:
                yield
            finally:
                if self.folder.exists() and self.manifest() is None:
                    self.remove()


def key(identity: dict[str, Any]) -> str:
    """A name for parts made of the same things in the same way."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def _is_ours(path: Path) -> bool:
    """A file, and not a link to one."""
    return stat.S_ISREG(path.lstat().st_mode)


def _odd(path: Path) -> str:
    return "a link" if path.is_symlink() else "a folder" if path.is_dir() else "a special file"


def _state(path: Path) -> tuple[int, ...]:
    """Another one when something else was written or moved there."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _checksum(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(name.encode(), digest_size=8)).hexdigest()
    except OSError:
        return ""


def _json(path: Path, parts: dict[str, type]) -> dict[str, Any] | None:
    """None if there is no such file; `{}` if it does not hold these parts."""
    try:
        found = json.loads(path.read_text()) if path.is_file() and not path.is_symlink() else None
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    if found is None:
        return {} if os.path.lexists(path) else None
    fits = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in parts.items())
    return found if fits else {}


def _open_lock(path: Path) -> IO[str]:
    try:  # what a link leads to is not touched
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644), "r+")
    except OSError as error:
        if path.is_symlink():
            raise InputError(f"{path} is a link: remove it, or give another output") from error
        raise


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
