"""An exported predictor: arrays of rows in, named arrays of as many rows out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from propagauss.errors import InputError

Run = Callable[..., Mapping[str, Any]]
Shape = tuple[int | None, ...]  # None where any size will do
EARLIER = {  # files from before likelihoods said which columns belong to them
    "Classifier": '{"prediction": "argmax of probabilities", "entropy": "entropy of probabilities"}',
    "Regressor": "{}",
}


class Input(NamedTuple):
    """What one input of the model takes."""

    name: str
    shape: Shape  # of one sample
    dtype: np.dtype


@dataclass(frozen=True)
class Model:
    """A predictor from a file; calling it with `[n, *shape]` for each input gives arrays `[n, ...]`."""

    name: str
    columns: dict[str, str]  # what is written beside its outputs, as the likelihood said when it was exported
    inputs: tuple[Input, ...]
    batch: int | None  # None: any
    run: Run

    def __call__(self, *arrays: np.ndarray) -> dict[str, np.ndarray]:
        rows = len(arrays[0])
        try:
            if self.batch is None:
                return self._checked(self.run(*arrays), rows)
            found = [self._filled(i, self.batch, arrays) for i in range(0, rows, self.batch)]
        except InputError:
            raise
        except Exception as error:  # each runtime has its own
            shapes = " and ".join(describe(x.shape) for x in arrays)
            raise InputError(
                f"{self.name} failed on an input of shape {shapes} ({reason(error)}): if memory was short, "
                "take a smaller batch"
            ) from error
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}

    def _filled(self, start: int, batch: int, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """With zeros below the rows up to the one batch size that the model takes."""
        rows = min(batch, len(arrays[0]) - start)
        filled = [np.zeros((batch, *x.shape[1:]), x.dtype) for x in arrays]
        for full, x in zip(filled, arrays, strict=True):
            full[:rows] = x[start : start + rows]
        return {name: value[:rows] for name, value in self._checked(self.run(*filled), batch).items()}

    def _checked(self, found: Mapping[str, Any], rows: int) -> dict[str, np.ndarray]:
        for name, value in found.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
                what = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise InputError(f"{self.name} returns {what} as '{name}': only tensors of numbers can be written")
            if value.shape[:1] != (rows,):
                raise InputError(
                    f"{self.name} returns '{name}' of shape {describe(value.shape)} for {rows} rows: its first "
                    "dimension must be the rows"
                )
        return dict(found)


def assembled(path: Path, details: Mapping[str, str], inputs: Sequence[Input], run: Run) -> Model:
    """A model of inputs whose first dimension still is the batch."""
    columns = _columns(path, details)
    if not inputs:
        raise InputError(f"{path.name} takes no inputs: there is nothing to predict from")
    scalars = [each.name for each in inputs if not each.shape]
    if scalars:
        raise InputError(f"{path.name} takes single numbers ({', '.join(scalars)}), not rows: export it with a batch")
    sizes = {each.shape[0] for each in inputs if each.shape[0] is not None}
    if len(sizes) > 1 or 0 in sizes:
        raise InputError(f"{path.name} takes inputs of different batches ({', '.join(map(str, sorted(sizes)))})")
    rows = tuple(Input(name, shape[1:], dtype) for name, shape, dtype in inputs)
    return Model(path.name, columns, rows, sizes.pop() if sizes else None, run)


def fit(shape: tuple[int, ...], wanted: Shape) -> tuple[int, ...] | None:
    """What samples of this shape become for a model that takes `wanted`; None if they do not fit.

    A flat sample may take any shape of its size, others only gain or lose dimensions of size 1: `[28, 28, 3]` is not
    `[3, 28, 28]` in another order.
    """
    if len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True)):
        return shape
    known = math.prod(w for w in wanted if w is not None)
    if wanted.count(None) > 1 or known == 0 or math.prod(shape) % known:
        return None
    filled = tuple(math.prod(shape) // known if w is None else w for w in wanted)
    same = [n for n in filled if n != 1] == [n for n in shape if n != 1]
    return filled if math.prod(filled) == math.prod(shape) and (len(shape) == 1 or same) else None


def describe(shape: Shape) -> str:
    """`[3, any]`"""
    return f"[{', '.join('any' if n is None else str(n) for n in shape)}]"


def _columns(path: Path, details: Mapping[str, str]) -> dict[str, str]:
    stored = details.get("columns", EARLIER.get(details.get("predictor", "")))
    if stored is None:
        raise foreign(path)
    try:
        return {name: str(how) for name, how in json.loads(stored).items()}
    except (AttributeError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} cannot be read as a model, it may be damaged or cut short ({reason(error)}): export or copy it again"
    )


def reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def foreign(path: Path) -> InputError:
    return InputError(f"{path} is not a predictor of propagauss: write one with Classifier.export or Regressor.export")
