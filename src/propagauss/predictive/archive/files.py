"""`.pt2` files of ours: what is written, and what is looked at before PyTorch may read it.

`torch.export.load` unpickles sample inputs, weights and constants if a file asks for it, and evaluates or executes
several strings of the program as Python: sizes, guards, names, the functions that are called. Here every entry of the
archive is checked first. PyTorch is then given a new archive, made of what was checked and nothing else, so that it
does not matter whether two readers of zip files agree.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from propagauss.alone import quiet
from propagauss.errors import InputError
from propagauss.predictive.archive import container, program, tensors
from propagauss.predictive.archive.refused import Refused

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/", "data/constants/"
CONFIGS = {WEIGHTS: ("model_weights_config.json", "weight_"), CONSTANTS: ("model_constants_config.json", "tensor_")}
DETAILS = "extra/propagauss.json"


class Loaded(NamedTuple):
    """An exported program, and what `export` wrote about it."""

    program: ExportedProgram
    details: dict[str, str]


def write(exported: ExportedProgram, path: Path, details: dict[str, str]) -> None:
    """Without pickled sample inputs, and without the places in source files from which every op came."""
    import torch

    exported.example_inputs = None
    for stored in (exported.state_dict, exported.constants):
        for name, value in stored.items():
            if isinstance(value, torch.Tensor) and _expanded(value):
                stored[name] = value.clone(memory_format=torch.contiguous_format)  # type: ignore[assignment]
    first = io.BytesIO()
    torch.export.save(exported, first, extra_files={"propagauss.json": json.dumps(details)})
    try:
        with zipfile.ZipFile(first) as archive, path.open("wb") as file:
            _repack(_checked(container.Archive(archive, first.getbuffer().nbytes), known_ops=False), file)
    except Refused as error:
        raise InputError(
            f"the network cannot be written such that the file is safe to load ({error}): export it to .onnx instead"
        ) from error


def load(path: str | os.PathLike[str]) -> Loaded:
    """The program in a file that `write` wrote; any other is refused, and nothing in it is executed."""
    file = opened(path)
    return Loaded(file.program(), file.details)


class Opened(NamedTuple):
    """A file of which everything was checked; `program` is what lets PyTorch read it."""

    details: dict[str, str]
    program: Callable[[], ExportedProgram]


def opened(path: str | os.PathLike[str]) -> Opened:
    """`load` in two steps, for those who look at the details before the program is read."""
    target = Path(path)
    with _explained(target), target.open("rb") as file, zipfile.ZipFile(file) as archive:
        entries = container.Archive(archive, os.fstat(file.fileno()).st_size)
        details = _details(target, entries)
        copy = io.BytesIO()
        _repack(_checked(entries, known_ops=True), copy)

    def program() -> ExportedProgram:
        with _explained(target):
            return _program(copy)

    return Opened(details, program)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except Refused as error:
        raise InputError(
            f"{path} is refused, since a file like this could run code or exhaust the memory ({error}): export the "
            "model again with this version of propagauss"
        ) from error
    except InputError:
        raise
    except Exception as error:  # zipfile, json and torch have many
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InputError(
            f"{path} cannot be read as a model, it may be damaged or cut short ({reason}): export or copy it again"
        ) from error


def _expanded(value: Any) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


def _program(file: IO[bytes]) -> ExportedProgram:
    import torch

    file.seek(0)
    with quiet():
        return torch.export.load(file)  # type: ignore[arg-type]


def _details(path: Path, entries: container.Archive) -> dict[str, str]:
    """What `export` wrote beside the program."""
    if DETAILS not in entries.sizes:
        raise InputError(
            f"{path} is not a predictor of propagauss: write one with Classifier.export or Regressor.export"
        )
    found = entries.json(DETAILS)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise Refused(f"{DETAILS} does not hold texts by name")
    if "propagauss" not in found or "inputs" not in found:
        raise Refused(f"{DETAILS} does not say which inputs there are, and which version wrote them")
    return found


def _checked(entries: container.Archive, known_ops: bool) -> dict[str, bytes | container.Entry]:
    """What a new archive may hold. Payloads are not read yet."""
    entries.require({MODEL, *(folder + config for folder, (config, _) in CONFIGS.items())})
    kept: dict[str, bytes | container.Entry] = {}
    for folder, (config, prefix) in CONFIGS.items():
        found = entries.json(folder + config)
        sizes = {name.removeprefix(folder): n for name, n in entries.sizes.items() if name.startswith(folder + prefix)}
        tensors.check(found, sizes, prefix)
        kept[folder + config] = json.dumps(found).encode()
        kept |= {folder + name: entries.entry(folder + name) for name in sizes}
    if entries.sizes.get(SAMPLES):
        raise Refused(f"{SAMPLES} is pickled")
    entries.only({*kept, MODEL, SAMPLES, DETAILS})
    kept[MODEL] = json.dumps(program.stripped(entries.json(MODEL), known_ops)).encode()
    kept[SAMPLES] = b""
    if DETAILS in entries.sizes:
        kept[DETAILS] = entries.entry(DETAILS)
    return kept


def _repack(kept: dict[str, bytes | container.Entry], file: IO[bytes]) -> None:
    from torch.export.pt2_archive import PT2ArchiveWriter

    with PT2ArchiveWriter(file) as writer:  # type: ignore[arg-type]
        for name, content in kept.items():
            writer.write_bytes(name, content if isinstance(content, bytes) else content.read())
