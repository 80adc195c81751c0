"""Models by the ending of their files. What a format needs is imported when a file of it is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from propagauss.errors import InputError
from propagauss.predict.models.model import Model


def load(path: Path, threads: int | None = None) -> Model:
    """The predictor in an `.onnx` or `.pt2` file, to run on so many threads."""
    if path.suffix not in (".onnx", ".pt2"):
        raise InputError(f"the model '{path.name}' must end in .onnx or .pt2, as Classifier.export wrote it")
    if not path.is_file():
        raise InputError(f"there is no model {path}" if not path.exists() else f"the model {path} is not a file")
    if path.suffix == ".onnx":
        from propagauss.predict.models import onnx_model

        return onnx_model.load(path, threads)
    from propagauss.predict.models import pt2_model

    return pt2_model.load(path, threads)


def digest(path: Path) -> str:
    """SHA-256 of the file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
