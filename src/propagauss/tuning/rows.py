"""A candidate and what is known of it: a row of the leaderboard."""

from __future__ import annotations

from dataclasses import dataclass

from propagauss.tuning.candidates import Candidate
from propagauss.tuning.judge import Verdict

HEAD = ["candidate", "NLPD", "±", "ECE", "AURC", "cost", "memory"]


@dataclass(frozen=True)
class Row:
    """One candidate. What it did is from data that did not calibrate it; None where there is nothing to say."""

    name: str
    parameters: str
    structure: str
    engine: str
    link: str
    prior_precision: float | None = None
    nlpd: float | None = None
    error: float | None = None  # standard error of the NLPD
    ece: float | None = None
    aurc: float | None = None
    cost: float | None = None  # times a plain forward pass
    memory: float | None = None  # times the plain model
    failure: str = ""  # why it was not judged
    winner: bool = False


@dataclass(frozen=True)
class Entry:
    """A row, and what stands behind it."""

    row: Row
    candidate: Candidate
    verdict: Verdict | None = None

    @property
    def judged(self) -> Verdict:
        assert self.verdict is not None
        return self.verdict


def cells_of(row: Row) -> list[str]:
    numbers = [(row.nlpd, ".4f"), (row.error, ".4f"), (row.ece, ".4f"), (row.aurc, ".4f"), (row.cost, ".1f")]
    shown = ["" if value is None else format(value, form) for value, form in (*numbers, (row.memory, ".1f"))]
    shown[4:] = [f"{each}x" if each else "" for each in shown[4:]]
    return [f"{'*' if row.winner else ' '} {row.name}", *shown]
