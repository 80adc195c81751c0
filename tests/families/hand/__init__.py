"""Families written out here in plain PyTorch, since no library that we have holds them."""

from __future__ import annotations

from families.family import Family
from families.hand import (
    generative,
    graph,
    parametrised,
    pixels,
    recommender,
    recurrent,
    science,
    sequence,
    sets,
    splines,
    tabular,
    vision,
)

ROOMS = (
    graph,
    tabular,
    science,
    splines,
    recommender,
    recurrent,
    sequence,
    parametrised,
    generative,
    sets,
    vision,
    pixels,
)


def families() -> list[Family]:
    return [family for room in ROOMS for family in room.FAMILIES.families]
