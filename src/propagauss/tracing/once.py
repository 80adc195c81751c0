"""Many networks from one export, for what makes dozens of them from the same model on the same example."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_KEPT: ContextVar[dict[Hashable, Any] | None] = ContextVar("_KEPT", default=None)


@contextmanager
def traced_once() -> Iterator[None]:
    """Within it, `trace` exports a model once for the very tensors of an example; neither may change meanwhile."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept_traces() -> dict[Hashable, Any] | None:
    """What was traced so far within `traced_once`; None outside of it."""
    return _KEPT.get()
