"""A note that says of which run an output is, so that the same run again finds it complete.

In a Parquet file it is part of the metadata. A CSV file has no place for it: the note is a small hidden file beside it,
which counts only as long as the output is as it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from propagauss.predict.writing.store import NOTE
from propagauss.predict.writing.whole import whole

NAME = "propagauss"
PARTS = {"key": str, "on_nan": str, "summary": dict}
SUMMARY = {"columns": list, "files": int, "rows": int, "skipped": int, "without": int}
MOST = 1 << 22


def entry(key: str, on_nan: str, summary: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, str]]:
    """To be asked when everything is counted."""
    return lambda: {NAME: json.dumps({"key": key, "on_nan": on_nan, "summary": summary()})}


def write(out: Path, assembled: Path, said: dict[str, str]) -> None:
    """Beside a CSV file that is about to take its place."""
    if _ending(out) == ".csv":
        note = assembled.with_name(NOTE)  # among the parts, where it is tidied up if the run ends here
        with whole(note) as file:
            file.write(json.dumps({"file": _state(assembled), NAME: said[NAME]}).encode())
        os.replace(note, _beside(out))


def read(out: Path) -> dict[str, Any] | None:
    """Of the output that is there; None if there is no note, or it is not ours, or of something else."""
    try:
        said = json.loads(_stored(out))
    except Exception:  # whatever is there may be anything
        return None
    return said if _has(said, PARTS) and _has(said["summary"], SUMMARY) else None


def _stored(out: Path) -> str | bytes:
    if _ending(out) != ".csv":
        return (pq.read_metadata(out).metadata or {})[NAME.encode()]
    beside = _beside(out)
    if not beside.is_file() or beside.stat().st_size > MOST:
        raise FileNotFoundError(beside)
    found = json.loads(beside.read_bytes())
    if found["file"] != _state(out):
        raise ValueError("the output was changed since")
    return found[NAME]


def _has(found: Any, parts: dict[str, type]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in parts.items())


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _beside(out: Path) -> Path:
    return out.parent / f".{out.name}.done"


def _ending(out: Path) -> str:
    return out.suffix.lower()
