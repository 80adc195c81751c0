"""An exported predictor read back: one array in, named arrays out. Files that `export` did not write are refused."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from propagauss.errors import InputError

Run = Callable[[np.ndarray], dict[str, np.ndarray]]
Shape = tuple[int | None, ...]  # None where any size will do
EARLIER = {  # files from before likelihoods said which columns belong to them
    "Classifier": '{"prediction": "argmax of probabilities", "entropy": "entropy of probabilities"}',
    "Regressor": "{}",
}


@dataclass(frozen=True)
class Model:
    """A predictor from a file; calling it maps `[n, *shape]` to arrays `[n, ...]`."""

    name: str
    columns: dict[str, str]  # what is written beside its outputs, as the likelihood said when it was exported
    shape: Shape  # of one sample
    dtype: np.dtype
    batch: int | None  # None: any
    run: Run

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        try:
            if self.batch is None:
                return self.run(x)
            found = [self._filled(x[i : i + self.batch], self.batch) for i in range(0, len(x), self.batch)]
        except Exception as error:  # each runtime has its own
            raise InputError(
                f"{self.name} failed on an input of shape {describe(x.shape)} ({_reason(error)}): if memory was short, "
                "take a smaller batch"
            ) from error
        return {name: np.concatenate([each[name] for each in found]) for name in found[0]}

    def _filled(self, x: np.ndarray, batch: int) -> dict[str, np.ndarray]:
        """With zeros below `x` up to the one batch size that the model takes."""
        below = np.zeros((batch - len(x), *x.shape[1:]), x.dtype)
        return {name: value[: len(x)] for name, value in self.run(np.concatenate([x, below])).items()}


def load(path: Path, threads: int | None = None) -> Model:
    """The predictor in an `.onnx` or `.pt2` file, to run on so many threads."""
    readers = {".onnx": _onnx, ".pt2": _archive}
    if path.suffix not in readers:
        raise InputError(f"the model '{path.name}' must end in .onnx or .pt2, as Classifier.export wrote it")
    if not path.is_file():
        raise InputError(f"there is no model {path}")
    return readers[path.suffix](path, threads)


def digest(path: Path) -> str:
    """SHA-256 of the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _model(path: Path, details: dict[str, str], inputs: list[tuple[str, Shape, np.dtype]], run: Run) -> Model:
    columns = _columns(path, details)
    if len(inputs) != 1:
        names = ", ".join(name for name, _, _ in inputs)
        raise InputError(f"{path.name} takes {len(inputs)} inputs ({names}); only models of one input can be streamed")
    _, (batch, *shape), dtype = inputs[0]
    return Model(path.name, columns, tuple(shape), dtype, batch, run)


def _columns(path: Path, details: dict[str, str]) -> dict[str, str]:
    stored = details.get("columns", EARLIER.get(details.get("predictor", "")))
    if stored is None:
        raise _foreign(path)
    try:
        return {name: str(how) for name, how in json.loads(stored).items()}
    except (AttributeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _onnx(path: Path, threads: int | None) -> Model:
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError("an .onnx model needs the package onnxruntime: pip install propagauss[export]") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong comes as an exception
    options.intra_op_num_threads = threads or 0
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _unreadable(path, error) from error
    details = session.get_modelmeta().custom_metadata_map
    if "propagauss" not in details:
        raise _foreign(path)
    inputs = [(i.name, tuple(n if isinstance(n, int) else None for n in i.shape), i.type) for i in session.get_inputs()]
    names = [o.name for o in session.get_outputs()]
    first = inputs[0][0]

    def run(x: np.ndarray) -> dict[str, np.ndarray]:
        found = session.run(None, {first: x})
        return {name: np.asarray(value) for name, value in zip(names, found, strict=True)}

    return _model(path, details, [(name, shape, _onnx_dtype(kind)) for name, shape, kind in inputs], run)


def _onnx_dtype(kind: str) -> np.dtype:
    name = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name))


def _archive(path: Path, threads: int | None) -> Model:
    details = _archive_details(path)
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(path)
            module = program.module()
    except Exception as error:
        raise _unreadable(path, error) from error
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    tensors = [values[str(name)] for name in program.graph_signature.user_inputs]
    names = details["inputs"].split(", ")
    inputs = [(name, _shape(t.shape), _dtype(path, t.dtype)) for name, t in zip(names, tensors, strict=True)]

    def run(x: np.ndarray) -> dict[str, np.ndarray]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            with torch.no_grad():
                return {name: value.numpy() for name, value in module(torch.from_numpy(x)).items()}
        finally:
            torch.set_num_threads(before)

    return _model(path, details, inputs, run)


def _archive_details(path: Path) -> dict[str, str]:
    """What `export` wrote beside the program; the checksums of everything in the archive are right."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            if broken:
                raise zipfile.BadZipFile(f"{broken} is damaged")
            own = [name for name in archive.namelist() if name.endswith("/extra/propagauss.json")]
            details = json.loads(archive.read(own[0])) if own else {}
    except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
        raise _unreadable(path, error) from error
    if "propagauss" not in details:
        raise _foreign(path)
    return details


def _shape(sizes: Any) -> Shape:
    return tuple(n if isinstance(n, int) else None for n in sizes)


def _dtype(path: Path, dtype: Any) -> np.dtype:
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError as error:
        raise InputError(
            f"{path.name} takes {dtype}, which NumPy does not have: export the model in float32"
        ) from error


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} cannot be read as a model, it may be damaged or cut short ({_reason(error)}): export or copy it again"
    )


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _foreign(path: Path) -> InputError:
    return InputError(f"{path} is not a predictor of propagauss: write one with Classifier.export or Regressor.export")
