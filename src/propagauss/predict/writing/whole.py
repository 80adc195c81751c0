"""Files that are there only when all of them is: written under another name, forced to the disk, renamed."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """To write what becomes `path`."""
    with written_whole(path.parent, path.name) as file:
        file.name_in_the_end = path.name
        yield file.stream


@contextmanager
def written_whole(folder: Path, name: str) -> Iterator[Summed]:
    """To write a file whose name is known only when it is complete: set `name_in_the_end`."""
    temporary = folder / f".{name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with temporary.open("wb") as stream:
            file = Summed(stream)
            yield file
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, folder / file.name_in_the_end)
        sync_folder(folder)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


class Summed:
    """A file that is written from front to back, with the checksum of what is in it."""

    def __init__(self, stream: IO[bytes]):
        self.stream, self.name_in_the_end, self.closed = stream, "", False
        self._sum = hashlib.blake2b(digest_size=8)

    def write(self, content: Any) -> int:
        self._sum.update(content)
        return self.stream.write(content)

    def checksum(self) -> str:
        return self._sum.hexdigest()

    def tell(self) -> int:
        return self.stream.tell()

    def flush(self) -> None:
        self.stream.flush()

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Arrow closes what it writes to; the file is closed when it is on the disk."""


def sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
