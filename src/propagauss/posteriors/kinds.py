"""The structures that a file may hold, by the name that is written in it, and `load_posterior`."""

from __future__ import annotations

import json
import os

import torch

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


def load_posterior(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Posterior:
    """Read a posterior written by `posterior.save`."""
    header, tensors = read(path, device)
    if header.get("format") != FORMAT or header.get("kind") not in KINDS:
        raise PosteriorError(f"{os.fspath(path)} is a safetensors file, but not a posterior saved by propagauss")
    try:
        if int(header["version"]) > VERSION:
            raise PosteriorError(f"it was written by a newer propagauss (format {header['version']}): upgrade")
        meta = json.loads(header["meta"])
        posterior = KINDS[header["kind"]]._from_state(tensors, meta)
        posterior.details = dict(meta["details"])
        posterior.shapes = {k: torch.Size(v) for k, v in meta["shapes"].items()} or None
    except (KeyError, TypeError, ValueError) as error:  # ours is a ValueError, too
        raise PosteriorError(f"{os.fspath(path)} does not hold a valid posterior: {error}") from error
    return posterior
