"""The account of what `streamline` did: one line for every op on an uncertain value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

POINTER = "pg.tasks.fidelity measures what counting as independent costs; pg.linearise does without"


@dataclass(frozen=True)
class Step:
    """One rewritten op: where it is, which rule it got, what that assumes."""

    op: str
    path: str
    rule: str
    structure: str
    shape: tuple[int | str, ...]
    note: str

    def extended(self, note: str) -> Step:
        """The same step with something to add."""
        return replace(self, note=f"{self.note}; {note}")

    @property
    def entries(self) -> int:
        """Of one sample."""
        return math.prod(size for size in self.shape if isinstance(size, int))


@dataclass(frozen=True)
class Plan:
    """All rewritten ops in order, and how many ops run untouched."""

    steps: tuple[Step, ...]
    untouched: int
    parameters: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        header = ("module", "op", "rule", "covariance", "shape", "what is assumed")
        rows = [(s.path, s.op, s.rule, s.structure, " x ".join(map(str, s.shape)), s.note) for s in self.steps]
        widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(
            f"{len(self.steps)} ops on uncertain values, {self.untouched} ops untouched, "
            f"{len(self.parameters)} random parameters"
        )
        return "\n".join([*lines, *self.notes, *([POINTER] if self.takes_as_independent else [])])

    @property
    def takes_as_independent(self) -> bool:
        """Whether values that move together count as independent anywhere, or random parameters have no effect."""
        assumed = [s.note if s.structure == "diagonal" else s.note.partition("(diagonal:")[0] for s in self.steps]
        return any("independent" in text or "no effect" in text for text in (*assumed, *self.notes))
