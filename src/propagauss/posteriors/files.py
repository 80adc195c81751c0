"""How a posterior lies in a file: safetensors, with its kind and whatever else is not a tensor in the header."""

from __future__ import annotations

import json
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from propagauss.errors import PosteriorError

FORMAT, VERSION = "propagauss.posteriors", 1


def write(path: str | os.PathLike[str], kind: str, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Whole or not at all."""
    if "__metadata__" in tensors:  # where safetensors keeps the header
        raise PosteriorError("a parameter is named '__metadata__', which a file cannot hold: rename it in the model")
    header = {"format": FORMAT, "version": str(VERSION), "kind": kind, "meta": json.dumps(meta)}
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # of a new file here; safetensors makes files private
        _save({k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}, temporary, header)
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _save(tensors: dict[str, Tensor], path: Path, header: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata=header)
    except SafetensorError as error:  # a full disk, say
        raise OSError(str(error)) from error


def read(path: str | os.PathLike[str], device: str | torch.device) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of a file that `write` wrote."""
    try:
        with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise PosteriorError(f"no such file: {os.fspath(path)}") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise PosteriorError(f"{os.fspath(path)} is not a readable safetensors file: {error}") from error
    return header, tensors
