"""The structures that a file may hold, by the name that is written in it, and `load_posterior`."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from propagauss.checks import kind
from propagauss.checks import path as checked_path
from propagauss.errors import PosteriorError
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.files import FORMAT, VERSION, read
from propagauss.posteriors.full import FullPosterior
from propagauss.posteriors.kronecker import KroneckerPosterior
from propagauss.posteriors.low_rank import LowRankPosterior
from propagauss.posteriors.spectral import SpectralPosterior

KINDS: dict[str, type[Posterior]] = {
    c.kind: c for c in (DiagonalPosterior, KroneckerPosterior, FullPosterior, SpectralPosterior, LowRankPosterior)
}
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_posterior(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Posterior:
    """Read a posterior written by `posterior.save`."""
    source = checked_path(path, "the path of the posterior", PosteriorError)
    if os.path.isdir(source):
        raise PosteriorError(f"{source} is a folder: give the name of a file that posterior.save wrote")
    header, tensors = read(source, _device(device))
    if header.get("format") != FORMAT or header.get("kind") not in KINDS:
        raise PosteriorError(f"{os.fspath(path)} is a safetensors file, but not a posterior saved by propagauss")
    try:
        if int(header["version"]) > VERSION:
            raise PosteriorError(f"it was written by a newer propagauss (format {header['version']}): upgrade")
        meta = _meta(header["meta"])
        _check_types(tensors)
        posterior = KINDS[header["kind"]]._from_state(tensors, meta)
        posterior.details, posterior.fitted_on = dict(meta["details"]), _fitted_on(meta)
        posterior.shapes = {name: torch.Size(shape) for name, shape in meta["shapes"].items()} or None
    except KeyError as error:
        raise PosteriorError(f"{os.fspath(path)} does not hold a valid posterior: it lacks {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:  # ours, too
        raise PosteriorError(f"{os.fspath(path)} does not hold a valid posterior: {error}") from error
    return posterior


def _device(given: Any) -> torch.device:
    """A device that there is."""
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except Exception as error:  # each backend has its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PosteriorError(f"device is {kind(given)}, which cannot be used here: {reason}") from error
    if device.type == "meta":
        raise PosteriorError("device is 'meta', which holds no values: load to 'cpu'")
    return device


def _meta(text: str) -> dict[str, Any]:
    """What is not a tensor: `names` or the like of the structure, and what all have."""
    meta = json.loads(text)
    if not isinstance(meta, dict) or not isinstance(meta["details"], dict) or not isinstance(meta["shapes"], dict):
        raise PosteriorError("its header does not hold details and shapes by name")
    if not all(isinstance(value, int | float) for value in meta["details"].values()):
        raise PosteriorError("its details are not numbers")
    for name, shape in meta["shapes"].items():
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise PosteriorError(f"the shape of '{name}' is {shape!r}")
    return meta


def _fitted_on(meta: dict[str, Any]) -> dict[str, str]:
    """Checksums by name; files of earlier versions have none."""
    found = meta.get("fitted_on", {})
    if not isinstance(found, dict) or not all(isinstance(v, str) and len(v) <= 64 for v in found.values()):
        raise PosteriorError("its header does not hold checksums of weights by name")
    return found


def _check_types(tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        if value.dtype not in TYPES:
            raise PosteriorError(f"'{name}' is of type {value.dtype}: save it in float32")
