"""Where families come from, in the order in which they are loaded."""

from __future__ import annotations

from collections.abc import Callable

from families import hand, hugging_face, pictures
from families.family import Family

SOURCES: list[Callable[[], list[Family]]] = [hand.families, hugging_face.families, pictures.families]
