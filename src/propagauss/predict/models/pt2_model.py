"""A `.pt2` file, run by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from propagauss.errors import InputError
from propagauss.predict.models.model import Input, Model, Shape, assembled, unreadable
from propagauss.predictive import archive
from propagauss.predictive.export import Deployed
from propagauss.predictive.loading import predictor_of, state_of


def load(path: Path, threads: int | None) -> Model:
    program, details = archive.load(path)
    names = details["inputs"].split(", ")
    try:
        module = _saved(path, program, details) if archive.SAVED in details else program.module()
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        tensors = [values[str(name)] for name in program.graph_signature.user_inputs]
        inputs = [Input(n, _shape(t), _dtype(path, t)) for n, t in zip(names, tensors, strict=True)]
    except InputError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error
    dtypes = [tensor.dtype for tensor in tensors]

    def run(*arrays: np.ndarray) -> dict[str, Any]:
        given = [torch.from_numpy(x).to(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        try:
            with torch.no_grad():
                return {name: _array(value) for name, value in module(*given).items()}
        finally:
            torch.set_num_threads(before)

    return assembled(path, details, inputs, run)


def _saved(path: Path, program: ExportedProgram, details: dict[str, str]) -> Callable[..., dict[str, torch.Tensor]]:
    """What `export` would have put into the program of a predictor that was saved."""
    predictor = predictor_of(path, program, state_of(path, details))
    return Deployed(predictor.net, lambda latent: predictor.likelihood.exported(predictor.scaled(latent)))


def _shape(tensor: Any) -> Shape:
    return tuple(n if isinstance(n, int) else None for n in tensor.shape)


def _dtype(path: Path, tensor: Any) -> np.dtype:
    """Of the arrays that become such tensors; types that NumPy does not have are made of float32."""
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"{path.name} takes a {type(tensor).__name__}: only tensors can be streamed")
    if tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        return np.dtype(np.float32)
    if tensor.dtype.is_complex:
        raise InputError(f"{path.name} takes {tensor.dtype}: export a model that takes real numbers")
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    known = not value.dtype.is_floating_point or value.dtype in (torch.float16, torch.float32, torch.float64)
    return (value if known else value.float()).numpy(force=True)
