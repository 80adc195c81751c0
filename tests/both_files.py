"""A predictor as both kinds of file, `.pt2` and `.onnx`, from one program: they differ in how it is written alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from propagauss.predictive import export


def both_files(predictor: Any, folder: Path, **options: Any) -> dict[str, Path]:
    """The files by their endings, as `export` writes them."""
    made: list[Any] = []

    def program(module: Any) -> Any:
        if not made:
            made.append(make(module))
        return made[0]

    make = export._program
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_program", program)
        return {ending: predictor.export(folder / f"m{ending}", **options) for ending in (".pt2", ".onnx")}
