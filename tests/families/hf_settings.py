"""What single architectures need beyond the general recipe: settings of the configuration, arguments of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {}

ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {}
