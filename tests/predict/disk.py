"""A disk that is full."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def full_disk(files: int) -> Iterator[None]:
    """After so many files."""
    left, real = [files], os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with mock.patch.object(os, "fsync", fsync):
        yield
