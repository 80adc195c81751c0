"""Files that are there only when all of them is: written under another name, and renamed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass
class Unnamed:
    """A file on its way: where it is written, and what it is to be called."""

    path: Path
    name: str


@contextmanager
def renamed(folder: Path, name: str) -> Iterator[Unnamed]:
    """To write a file that gets its name in the end; the name may be changed until then."""
    file = Unnamed(folder / f".{name}.{uuid.uuid4().hex[:12]}.tmp", name)
    try:
        yield file
        os.replace(file.path, folder / file.name)
    except BaseException:
        with suppress(OSError):
            file.path.unlink()
        raise


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """To write what becomes `path`, forced to the disk before it gets its name: no power cut leaves half of it."""
    with renamed(path.parent, path.name) as file, file.path.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
