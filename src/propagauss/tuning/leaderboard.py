"""What was tried, how good it was and what it cost: a table, and which of it to take."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from propagauss.checks import new_file
from propagauss.predictive.calibration import paired
from propagauss.tuning.rows import HEAD, Entry, Row, cells_of

TIED = 2.0  # standard errors above the least NLPD that the data do not tell from it
AS_GOOD = 0.5  # standard errors that a posterior, or a model as it is, may be above the best plain model
NOTHING = 1e-6  # a difference in NLPD that nobody will notice


class Leaderboard:
    """The candidates of `tune`, the best first; `print` it, or take its `rows`.

    `str(leaderboard)` has a line for each candidate, and says at the end which was taken, and why. `report` writes it
    as a page with plots.
    """

    def __init__(self, entries: Sequence[Entry], winner: Entry, why: str, points: int):
        judged = sorted((e for e in entries if e.verdict is not None), key=lambda e: e.judged.nlpd)
        failed = [e for e in entries if e.verdict is None]
        self.entries = [self._marked(e, winner) for e in (*judged, *failed)]
        self.why, self.points = why, points

    @staticmethod
    def _marked(entry: Entry, winner: Entry) -> Entry:
        return dataclasses.replace(entry, row=dataclasses.replace(entry.row, winner=entry is winner))

    @property
    def rows(self) -> list[Row]:
        return [entry.row for entry in self.entries]

    @property
    def winner(self) -> Row:
        return next(row for row in self.rows if row.winner)

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, for a data frame or JSON."""
        return [dataclasses.asdict(row) for row in self.rows]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [HEAD, *(cells_of(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
        text = [_line(line, widths) for line in lines]
        text = [f"{line}  {row.failure}".rstrip() for line, row in zip(text, [_NONE, *self.rows], strict=True)]
        text.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*text, self.why])

    __repr__ = __str__

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the table with plots as an HTML file that needs nothing else; returns its path."""
        from propagauss.tuning.report import write  # matplotlib is slow to import, and optional

        return write(self.entries, self.why, self.points, new_file(path, "the path of the report"))


_NONE = Row("", "", "", "", "")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
    return "  ".join([first, *rest]).rstrip()


def choose(entries: Sequence[Entry], points: int) -> tuple[Entry, str]:
    """The one to take, and why.

    Of all that is within two standard errors of the least NLPD, paired over the points, what has no epistemic variance
    (or lost it in calibration), or is more than half a standard error above the best plain model, is left out unless
    nothing else remains. Of the rest that is taken whose variance says most (`Candidate.knows`), and of those that say
    as much the best: what a prediction may cost was settled by the budget. If only plain models remain, the one without
    a temperature is taken if it is within half a standard error of the other.
    """
    judged = [e for e in entries if e.verdict is not None]
    best = min(judged, key=lambda e: e.judged.nlpd)
    tied = [e for e in judged if _is_within(TIED, e, best)]
    base = min((e for e in judged if e.candidate.engine == "plain"), key=lambda e: e.judged.nlpd, default=best)
    uncertain = [e for e in tied if e.candidate.engine != "plain" and e.judged.kept and _is_within(AS_GOOD, e, base)]
    plain = [e for e in tied if e.candidate.engine == "plain"]
    as_it_is = [e for e in plain if not e.candidate.calibrated and _is_within(AS_GOOD, e, base)]
    most = max((e.candidate.knows for e in uncertain), default=None)
    pool = [e for e in uncertain if e.candidate.knows == most] or as_it_is or plain or tied
    winner = min(pool, key=lambda e: e.judged.nlpd)
    return winner, _why(winner, best, judged, points)


def _is_within(errors: float, one: Entry, other: Entry) -> bool:
    """Whether one is above the other by no more than so many standard errors."""
    mean, error = paired(one.judged.losses, other.judged.losses)
    return mean <= errors * error + NOTHING


def _why(winner: Entry, best: Entry, judged: Sequence[Entry], points: int) -> str:
    where = f"on {points} validation points, {winner.judged.nlpd:.4f}"
    if winner.candidate.engine == "plain":
        return (
            f"'{winner.row.name}' wins: no posterior that keeps its variance is within two standard errors of the "
            f"least NLPD, and half a one of the best plain model, {where}. Its predictions have no epistemic "
            "uncertainty."
        )
    if winner is best:
        text = f"'{winner.row.name}' wins with the least NLPD {where}."
    else:
        text = (
            f"'{winner.row.name}' wins: its variance says most of all that are within two standard errors of the least "
            f"NLPD {where} against {best.judged.nlpd:.4f} of '{best.row.name}'."
        )
    plain = [e for e in judged if e.candidate.engine == "plain"]
    if plain:
        base = min(plain, key=lambda e: e.judged.nlpd)
        mean, error = paired(winner.judged.losses, base.judged.losses)
        word = "below" if mean < 0 else "above"
        text += f" It is {abs(mean):.4f} ± {error:.4f} {word} '{base.row.name}'."
    return text
