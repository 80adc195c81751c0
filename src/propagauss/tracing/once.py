"""Many networks from one export, for what makes dozens of them from the same model on examples of the same form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MOST = 16  # traces that are kept at a time, the latest

_KEPT: ContextVar[dict[Hashable, Any] | None] = ContextVar("_KEPT", default=None)


@contextmanager
def traced_once() -> Iterator[None]:
    """Within it, `trace` exports a model once for all examples of the same form; the model may not change meanwhile."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def recall(*keys: Hashable) -> Any:
    """What was kept under one of these keys within `traced_once`; None outside of it."""
    kept = _KEPT.get() or {}
    return next((kept[key] for key in keys if key in kept), None)


def keep(key: Hashable, make: Callable[[], Any]) -> None:
    """Keep what is made, if within `traced_once`."""
    kept = _KEPT.get()
    if kept is not None:
        kept[key] = make()
        while len(kept) > MOST:
            del kept[next(iter(kept))]
