"""Results on disk: `FOLDER/EXPERIMENT/MODE/UNIT.json`, each written whole when its unit ends."""

from __future__ import annotations

import functools
import json
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import propagauss
from experiments.frame.experiment import Mode, Record, Unit
from propagauss.demo.report.files import write

_PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "laplace-torch", "ivon-opt", "transformers")


class Store:
    """The stored records of one experiment in one mode."""

    def __init__(self, folder: Path, experiment: str, mode: Mode):
        self.folder = folder / experiment / mode
        self.experiment, self.mode = experiment, mode

    def has(self, unit: Unit, seed: int) -> bool:
        """Whether the unit was run with this configuration and seed."""
        stored = self._read(self._path(unit.key))
        return stored is not None and stored["config"] == _plain(unit.config) and stored["seed"] == seed

    def put(self, unit: Unit, seed: int, seconds: float, results: Record) -> Path:
        record = {
            "experiment": self.experiment,
            "unit": unit.key,
            "mode": self.mode,
            "seed": seed,
            "config": _plain(unit.config),
            "versions": versions(),
            "seconds": round(seconds, 1),
            "results": results,
        }
        path = self._path(unit.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(path, json.dumps(record, indent=1, allow_nan=False) + "\n")

    def records(self) -> dict[str, dict[str, Any]]:
        """All that is stored, by key: the whole files, with `results` among their entries."""
        found = {path.stem: self._read(path) for path in sorted(self.folder.glob("*.json"))}
        return {key: record for key, record in found.items() if record is not None}

    def _path(self, key: str) -> Path:
        if not re.fullmatch(r"[\w.-]+", key):
            raise ValueError(f"'{key}' cannot be the name of a file")
        return self.folder / f"{key}.json"

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # absent, or not ours: the unit is run again
        return stored if isinstance(stored, dict) and {"config", "seed", "results"} <= stored.keys() else None


@functools.cache  # reading what is installed takes longer than some units
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "propagauss": propagauss.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plain(config: Mapping[str, Any]) -> Any:
    """As JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(config))
