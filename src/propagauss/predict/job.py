"""`predict`: an exported model over a data set of any size, into one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from propagauss.errors import InputError
from propagauss.predict.options import Options, Summary


def predict(
    model: str | PathLike[str],
    data: str | PathLike[str],
    out: str | PathLike[str],
    *,
    columns: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    id: str | None = None,
    batch: int | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    threads: int | None = None,
    on_nan: Literal["error", "skip", "keep"] = "error",
    restart: bool = False,
    overwrite: bool = False,
    part_rows: int | None = None,
    address: str | None = None,
    progress: bool = True,
) -> Summary:
    """Predict every row of `data` with the model that `Classifier.export` or `Regressor.export` wrote.

    Rows are streamed, so the data may be larger than memory. Finished parts are kept beside the output until it is
    whole: the same call after an interruption goes on from there, and no row is lost or written twice.

    Args:
        model: an `.onnx` or `.pt2` file.
        data: a `.parquet`, `.csv` or `.npy` file, or a folder of files of one of these kinds (read by name).
        out: a `.parquet` or `.csv` file.
        columns: what makes the input, in the order of training: columns of numbers, or one column of lists. If not
            given, all columns of numbers except the id, or the only column of lists that fits. For a model of
            several inputs, `{input: columns}`; if not given, each takes the column of its name, or `x_0`, `x_1`, ...
        id: a column copied to the output; if not given, `row` counts from 0.
        batch: rows at a time; if not given, some megabytes of them.
        engine: "local", or "ray": `workers` processes, here or in the cluster at `address` (or in RAY_ADDRESS).
        threads: of the model's runtime, in each worker.
        on_nan: what to do with rows that have a value which is not finite, in the data or in the prediction.
        restart: discard parts of an earlier run that was not finished.
        overwrite: replace an output that is there.
        part_rows: rows in a part, the unit that is kept.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise InputError("predict needs the package pyarrow: pip install propagauss[predict]") from error
    from propagauss.predict.run import run

    summary = run(
        Options(
            model=_resolved("model", model),
            data=_resolved("data", data),
            out=_resolved("out", out),
            columns=_names(columns),
            id=id,
            batch=batch,
            engine=engine,
            workers=workers,
            threads=threads,
            on_nan=on_nan,
            restart=restart,
            overwrite=overwrite,
            part_rows=part_rows,
            address=address,
            progress=progress,
        )
    )
    return replace(summary, out=Path(out))


def _resolved(name: str, path: str | PathLike[str]) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except (TypeError, ValueError, RuntimeError, OSError) as error:  # no path, a NUL, a circle of links
        raise InputError(f"{name} is {str(path)!r}, which is not a path that can be followed ({error})") from error


def _names(columns: Any) -> tuple[str, ...] | dict[str, tuple[str, ...]] | None:
    if isinstance(columns, Mapping):
        return {name: _names(each) or () for name, each in columns.items()}  # type: ignore[misc]
    if isinstance(columns, str) or not isinstance(columns, Iterable | None):
        raise InputError(f"columns is {columns!r}; give a list of names")
    return None if columns is None else tuple(columns)
