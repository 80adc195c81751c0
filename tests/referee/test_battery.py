"""Every case of the battery is right, or refused as the page says.

A normal run judges most cases in one of the two modes, with one posterior; REFEREE_LONG=1 in both, with all of them.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from referee.case import Case
from referee.cases import BATTERY
from referee.judge import judge
from referee.table import MODES, kinds_on
from referee.truth import STRUCTURES, Mode

PAGE = Path(__file__).parents[2] / "docs" / "referee.md"
LONG = bool(os.environ.get("REFEREE_LONG"))
IN_BOTH_MODES = {"Attention", "Residual, dense and gated blocks", "Detach, aliases and ops in place"}


def _runs() -> list[tuple[Case, Mode, str]]:
    if LONG:
        return [(c, mode, structure) for c in BATTERY for mode in MODES for structure in STRUCTURES]
    return [
        (c, mode, c.turn if mode == "full" else "diagonal")
        for c in BATTERY
        for i, mode in enumerate(MODES)
        if c.section in IN_BOTH_MODES or _lot(c) % 2 == i
        if c.section != "Elementwise functions" or _lot(c) % 4 < 2
    ]


def _lot(case: Case) -> int:
    """A number that depends on nothing but the name."""
    return zlib.crc32(case.name.encode()) // len(STRUCTURES)


@pytest.mark.parametrize(("case", "mode", "structure"), _runs(), ids=lambda v: str(v))
def test_case(case: Case, mode: Mode, structure: str) -> None:
    verdict = judge(case, mode, structure)
    assert verdict.is_good, str(verdict)
    said = kinds_on(PAGE).get(case.name, ("nothing", "nothing"))[MODES.index(mode)]
    # the page has the worst over all posteriors
    allowed = {said, "exact"} if said != "refused" else {said}
    assert verdict.kind in allowed, f"{verdict}, but {PAGE.name} says {said}: make referee writes the page"


def test_names_are_unique() -> None:
    names = [c.name for c in BATTERY]
    assert sorted(set(names)) == sorted(names)
