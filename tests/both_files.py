"""A predictor as both kinds of file, `.pt2` and `.onnx`, from one program: they differ in how it is written alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from propagauss.predictive import export


def both_files(predictor: Any, folder: Path, **options: Any) -> dict[str, Path]:
    """The files by their endings, as `export` writes them."""
    made: list[Any] = []

    def program(*call: Any) -> Any:
        if not made:
            made.append(exported(*call))
        return made[0]

    exported = export._exported
    # every op is seen half a dozen times on its way into both files, so that keeping what it does pays; see conftest.py
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(fake_tensor_cache_enabled=True):
        patch.setattr(export, "_exported", program)
        return {ending: predictor.export(folder / f"m{ending}", **options) for ending in (".pt2", ".onnx")}
