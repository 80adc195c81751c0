"""Runs killed at one of their steps on the disk: `python killing.py MODEL DATA FOLDER ENDING`, for test_resume.py.

Prints, for every step, how the killed run ended, how the one after it did, and what it left beside the output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # noqa: F401  (imported once, before the forks)
import pyarrow as pa

import propagauss.predict.run  # noqa: F401
from propagauss.errors import InputError
from propagauss.predict import predict
from propagauss.predict.reading import csv_file, npy_file, parquet_file  # noqa: F401

OPTIONS: dict[str, Any] = {"part_rows": 400, "id": "key", "on_nan": "skip", "threads": 1, "progress": False}
STEPS = ("fsync", "replace", "unlink", "rmdir")


def forked(work: Callable[[], object]) -> int:
    """Exit code of a process that does this, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except InputError:
            os._exit(3)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(step: int) -> None:
    """From now on count the steps, and do not survive this one."""
    left = [step]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def main(model: str, data: str, folder: str, ending: str) -> None:
    pa.array(np.zeros(1))  # imports pandas, where it is installed
    step, first = 0, -signal.SIGKILL
    while first != 0:
        step += 1
        out = Path(folder) / f"{step}.{ending}"

        first = forked(lambda step=step, out=out: (killed_at(step), predict(model, data, out, **OPTIONS)))
        whole = out.exists()
        again = forked(lambda out=out: predict(model, data, out, **OPTIONS))
        left = (Path(folder) / f".{out.name}.parts").exists()
        print(json.dumps({"first": first, "whole": whole, "again": again, "left": left, "out": str(out)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
