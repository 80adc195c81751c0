"""Families written out here in plain PyTorch, since no library that we have holds them."""

from __future__ import annotations

from families.family import Family
from families.hand import generative, graph, parametrised, recommender, recurrent, science, sequence, sets, tabular, vision

ROOMS = (graph, tabular, science, recommender, recurrent, sequence, parametrised, generative, sets, vision)


def families() -> list[Family]:
    return [family for room in ROOMS for family in room.FAMILIES.families]
