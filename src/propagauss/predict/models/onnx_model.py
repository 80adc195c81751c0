"""An `.onnx` file, run by ONNX Runtime; PyTorch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from propagauss.errors import InputError
from propagauss.predict.models import onnx_file
from propagauss.predict.models.model import Input, Model, assembled, foreign, unreadable

NUMBERS = {
    **{"float": "float32", "double": "float64", "float16": "float16", "bool": "bool"},
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
FOLDED = 1 << 26  # bytes: larger constants are computed when the model runs, not while it is loaded


def load(path: Path, threads: int | None) -> Model:
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError("an .onnx model needs the package onnxruntime: pip install propagauss[predict]") from error
    stored = path.read_bytes()
    try:
        onnx_file.check(stored)
    except onnx_file.Outside as error:
        raise InputError(
            f"{path} is refused, since it would read other files ({error}): export the model again, into one file"
        ) from error
    except ValueError as error:
        raise unreadable(path, error) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong comes as an exception
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(FOLDED))
    try:
        session = onnxruntime.InferenceSession(stored, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise unreadable(path, error) from error
    details = session.get_modelmeta().custom_metadata_map
    if "propagauss" not in details:
        raise foreign(path)
    inputs = [Input(each.name, _shape(each.shape), _dtype(path, "takes", each)) for each in session.get_inputs()]
    for each in session.get_outputs():
        _dtype(path, "returns", each)
    names, results = [each.name for each in inputs], [each.name for each in session.get_outputs()]

    def run(*arrays: np.ndarray) -> dict[str, Any]:
        found = session.run(results, dict(zip(names, arrays, strict=True)))
        return dict(zip(results, found, strict=True))

    return assembled(path, details, inputs, run)


def _shape(sizes: Any) -> tuple[int | None, ...]:
    return tuple(n if isinstance(n, int) else None for n in sizes)


def _dtype(path: Path, what: str, value: Any) -> np.dtype:
    name = value.type.removeprefix("tensor(").removesuffix(")")
    if name not in NUMBERS:
        raise InputError(
            f"{path.name} {what} {value.type} as '{value.name}', which NumPy does not have as numbers: "
            "export the model in float32"
        )
    return np.dtype(NUMBERS[name])
