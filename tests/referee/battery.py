"""All cases of the battery, in the order of the table."""

from __future__ import annotations

import zlib

from referee.case import Case
from referee.elementwise import ELEMENTWISE
from referee.idioms import IDIOMS
from referee.layers import LAYERS
from referee.ops import OPS
from referee.truth import STRUCTURES

BATTERY: list[Case] = [*LAYERS, *OPS, *IDIOMS, *ELEMENTWISE]
SHARED = {c.name for c in BATTERY if c.shared}  # where the library may fall back on independence, if it says so
NAMES = [c.name for c in BATTERY]
assert len(set(NAMES)) == len(NAMES), sorted({n for n in NAMES if NAMES.count(n) > 1})


def rotated(case: Case) -> str:
    """The structure of the posterior that a case gets in a short run; other cases coming or going do not change it."""
    return STRUCTURES[zlib.crc32(case.name.encode()) % len(STRUCTURES)]
