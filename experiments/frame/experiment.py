"""What an experiment is: units of work, run and stored one by one, and a section of the report made from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Mode = Literal["quick", "full"]
Record = Mapping[str, Any]  # what a unit returned, as JSON keeps it


@dataclass(frozen=True)
class Context:
    """What a unit may depend on besides its own configuration."""

    mode: Mode
    seed: int = 0
    data: Path | None = None  # else PROPAGAUSS_DATA
    cache: Path = Path("results/cache")  # trained weights, so that experiments can share them; never committed

    @property
    def quick(self) -> bool:
        return self.mode == "quick"

    @property
    def data_folder(self) -> Path | None:
        named = os.environ.get("PROPAGAUSS_DATA")
        return self.data or (Path(named) if named else None)


@dataclass(frozen=True)
class Unit:
    """One piece of work: its numbers are written when it ends, and are not computed again while `config` stays."""

    key: str  # letters, digits, '-', '_' and '.'; also the name of its file
    config: Mapping[str, Any]  # what the numbers depend on besides seed and code
    run: Callable[[Context], Record]


@dataclass(frozen=True)
class Section:
    """Part of the report. `readings` say what the numbers show; `body` is HTML made with `experiments.report.html`."""

    body: str
    readings: Sequence[str] = ()
    headline: str = ""  # Markdown for the README; most experiments have none


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    source: str  # which tables and figures of the paper
    units: Callable[[Context], list[Unit]]
    section: Callable[[dict[str, Record]], Section]  # from the records stored, by key of their unit
    needs: tuple[str, ...] = field(default=())  # modules of packages beyond propagauss[demo]
