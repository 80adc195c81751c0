"""The zip file around a `.pt2`: which entries there are, and nothing that grows when it is read."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

from propagauss.predictive.archive.refused import Refused

# written by every torch.export.save beside what is in it; PyTorch makes them anew
MARKS = {"archive_format", "archive_version", ".data/version", "byteorder", ".data/serialization_id"}
SMALL = 1 << 10  # bytes of a mark
JSON_BYTES = 1 << 28
LEGACY = ("serialized_", "version", "code/", "constants.pkl", "data.pkl")
COMPILED = "data/aotinductor/"


class Entry(NamedTuple):
    """Read when it is needed."""

    read: Callable[[], bytes]


class Archive:
    """Entries by their names below the one folder at the top."""

    def __init__(self, archive: zipfile.ZipFile, size: int):
        self._archive = archive
        self._entries = _by_name(archive.infolist())
        self.sizes = {name: entry.file_size for name, entry in self._entries.items()}
        if sum(self.sizes.values()) > size:
            raise Refused(f"its entries are said to be {sum(self.sizes.values()):,} bytes, the file has {size:,}")
        for name in MARKS & set(self.sizes):
            self._mark(name)

    def require(self, names: set[str]) -> None:
        missing = sorted(names - set(self.sizes))
        if missing:
            old = any(name.startswith(LEGACY) for name in self.sizes)
            raise Refused("it has the layout of an older PyTorch" if old else f"it lacks {', '.join(missing)}")

    def only(self, names: set[str]) -> None:
        """Nothing but these and the marks."""
        others = sorted(set(self.sizes) - names - MARKS)
        if others:
            what = "compiled code" if others[0].startswith(COMPILED) else "an entry that export does not write"
            raise Refused(f"{others[0][:100]!r} is {what}")

    def entry(self, name: str) -> Entry:
        return Entry(lambda: self._archive.read(self._entries[name]))  # checks the sum of the bytes, too

    def json(self, name: str) -> Any:
        if self.sizes[name] > JSON_BYTES:
            raise Refused(f"{name} is {self.sizes[name]:,} bytes long")
        try:
            return json.loads(self.entry(name).read())
        except (RecursionError, UnicodeDecodeError, ValueError) as error:
            raise Refused(f"{name} is not JSON as export writes it ({str(error)[:100]})") from error

    def _mark(self, name: str) -> None:
        if self.sizes[name] > SMALL:
            raise Refused(f"{name} is {self.sizes[name]:,} bytes long")
        found = self.entry(name).read()
        if name == "byteorder" and found != sys.byteorder.encode():
            raise Refused(f"its numbers are in the byte order {found.decode(errors='replace')!r}")
        if name == "archive_format" and found != b"pt2":
            raise Refused("it is not a torch.export archive")


def _by_name(infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    roots = {info.filename.split("/", 1)[0] for info in infos}
    if len(roots) != 1:
        raise Refused("not all of its entries are in one folder" if roots else "it has no entries")
    for info in infos:
        name = info.filename.split("/", 1)[-1]
        parts = name.split("/")
        if not name.isascii() or not name.isprintable() or any(part in ("", ".", "..") for part in parts):
            raise Refused(f"it has an entry named {info.filename[:100]!r}")
        if info.orig_filename != info.filename or "\\" in name or ":" in name:
            raise Refused(f"it has an entry named {info.orig_filename[:100]!r}")
        if name in found:
            raise Refused(f"there are two entries named {name[:100]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Refused(f"{name[:100]!r} is compressed, which export never does")
        if info.flag_bits & 0x1:
            raise Refused(f"{name[:100]!r} is encrypted")
        found[name] = info
    return found
