"""A disk that is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def full_disk(files: int) -> Iterator[None]:
    """After so many files."""
    left, real = [files], os.replace

    def replace(*args: Any, **options: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args, **options)

    with mock.patch.object(os, "replace", replace):
        yield
