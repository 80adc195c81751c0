"""No `.pt2` file can run code or take more memory than it has bytes; what export writes passes."""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import propagauss as pg
from predictive import hostile
from propagauss.errors import InputError
from propagauss.predictive import archive

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> hostile.Entries:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-2) for n, p in model.named_parameters()})
    net = pg.streamline(model, posterior, torch.zeros(2, 4))
    return hostile.entries(pg.Classifier(net).export(tmp_path_factory.mktemp("good") / "m.pt2"))


def test_what_export_writes(good: hostile.Entries, tmp_path: Path) -> None:
    """Nothing pickled, and no paths of the machine on which it was made."""
    assert good[hostile.SAMPLES] == b""
    assert not any(b"stack_trace" in content or b"propagauss/" in content for content in good.values())
    hostile.write(tmp_path / "m.pt2", good)
    program, details = archive.load(tmp_path / "m.pt2")
    x = torch.randn(5, 4)
    found, plain = program.module()(x), torch.export.load(tmp_path / "m.pt2").module()(x)
    assert details["inputs"] == "x" and list(found) == ["mean", "variance", "probabilities"]
    assert all(torch.equal(found[name], plain[name]) for name in found)


@pytest.mark.parametrize("name", hostile.CODE)
def test_no_file_runs_code(name: str, good: hostile.Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile_module", raising=False)
    path, marker, found = tmp_path / "m.pt2", tmp_path / "marker", dict(good)
    hostile.CODE[name](found, marker)
    hostile.write(path, found)
    if name == "guard that is Python":  # guards are left out
        assert archive.load(path).program.module()(torch.zeros(3, 4))["mean"].shape == (3, 3)
    else:
        with pytest.raises(InputError, match=r"m\.pt2 is refused, since .* export the model again"):
            archive.load(path)
    assert not marker.exists()
    if name in hostile.REAL:  # so that this test would notice if it were empty
        with contextlib.suppress(Exception):
            torch.export.load(path)
        assert marker.exists()


@pytest.mark.parametrize("name", hostile.ODD)
def test_odd_files_are_refused(name: str, good: hostile.Entries, tmp_path: Path) -> None:
    path, marker, found = tmp_path / "m.pt2", tmp_path / "marker", dict(good)
    hostile.ODD[name](found, marker)
    hostile.write(path, found)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"m\.pt2 is refused"):
            archive.load(path)
        assert tracemalloc.get_traced_memory()[1] < 20 * path.stat().st_size + (1 << 25)
    finally:
        tracemalloc.stop()
    assert not marker.exists()


def test_nothing_grows_when_it_is_read(good: hostile.Entries, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    found = good | {"data/weights/weight_0": bytes(1 << 26)}
    hostile.write(path, found, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match="is compressed"):
        archive.load(path)


def test_entries_that_share_their_bytes(good: hostile.Entries, tmp_path: Path) -> None:
    """A directory whose entries all lead to the same bytes."""
    path = tmp_path / "m.pt2"
    hostile.write(path, good | {"data/weights/weight_0": bytes(1 << 20)})
    with zipfile.ZipFile(path, "a") as file:
        (large,) = [info for info in file.infolist() if info.filename.endswith("weight_0")]
        for i in range(50, 60):
            copy = zipfile.ZipInfo(f"archive/data/weights/weight_{i}")
            for name in ("file_size", "compress_size", "CRC", "header_offset"):
                setattr(copy, name, getattr(large, name))
            file.filelist.append(copy)
            file.NameToInfo[copy.filename] = copy
        file._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="entries are said to be"):
        archive.load(path)


@pytest.mark.parametrize("names", [["archive/a", "other/b"], [], ["archive/x"], ["/etc/passwd"], ["archive//x"]])
def test_other_layouts(names: list[str], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as file:
        for name in names:
            file.writestr(name, "x")
    with pytest.raises(InputError, match=r"is refused|is not a predictor"):
        archive.load(tmp_path / "m.pt2")


def test_two_entries_of_one_name(good: hostile.Entries, tmp_path: Path) -> None:
    hostile.write(tmp_path / "m.pt2", good)
    with zipfile.ZipFile(tmp_path / "m.pt2", "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr(f"archive/{hostile.MODEL}", good[hostile.MODEL])
    with pytest.raises(InputError, match="two entries"):
        archive.load(tmp_path / "m.pt2")


def test_a_second_archive_in_front(good: hostile.Entries, tmp_path: Path) -> None:
    """Readers of zip files differ in what they make of such a file: PyTorch sees only what was checked."""
    bad = dict(good)
    hostile.sample_inputs(bad, tmp_path / "marker")
    hostile.write(tmp_path / "bad.pt2", bad)
    hostile.write(tmp_path / "good.pt2", good)
    path = tmp_path / "m.pt2"
    path.write_bytes((tmp_path / "bad.pt2").read_bytes() + (tmp_path / "good.pt2").read_bytes())
    assert archive.load(path).program.module()(torch.zeros(3, 4))["mean"].shape == (3, 3)
    assert not (tmp_path / "marker").exists()


def test_legacy_archive(tmp_path: Path) -> None:
    """The layout of PyTorch 2.7 and before."""
    payload = hostile.pickled(tmp_path / "marker")
    with zipfile.ZipFile(tmp_path / "m.pt2", "w") as file:
        file.writestr("version", "8.20")
        file.writestr("serialized_exported_program.json", "{}")
        for name in ("state_dict", "constants", "example_inputs"):
            file.writestr(f"serialized_{name}.pt", payload)
    with pytest.raises(InputError, match="is refused"):
        archive.load(tmp_path / "m.pt2")
    assert not (tmp_path / "marker").exists()


def mutated(value: object, rng: random.Random) -> object:
    """With something else at one place."""
    strange = [
        None,
        True,
        -1,
        1 << 70,
        1e999,
        "x y",
        "__import__('os')",
        [],
        {},
        [[]],
        {"as_int": 3},
        "torch.os.system",
    ]
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value[key] = mutated(value[key], rng)  # type: ignore[index]
        return value
    return rng.choice(strange)


@pytest.mark.parametrize("seed", range(60))
def test_programs_with_something_else_at_one_place(seed: int, good: hostile.Entries, tmp_path: Path) -> None:
    """Refused, or the same as before; never another error."""
    rng, found = random.Random(seed), dict(good)
    name = rng.choice([hostile.MODEL, hostile.WEIGHTS, hostile.CONSTANTS])
    found[name] = json.dumps(mutated(json.loads(found[name]), rng)).encode()
    hostile.write(tmp_path / "m.pt2", found)
    try:
        archive.load(tmp_path / "m.pt2")
    except InputError as error:
        assert "m.pt2" in str(error)


def test_weights_that_are_expanded(tmp_path: Path) -> None:
    """One number for many is written out, so that the file passes."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("shift", torch.ones(1).expand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.shift

    model = Shifted().eval()
    posterior = pg.DiagonalPosterior({"layer.weight": torch.full((3, 4), 0.1)})
    path = pg.Classifier(pg.streamline(model, posterior, torch.zeros(2, 4))).export(tmp_path / "m.pt2")
    x = torch.randn(5, 4)
    torch.testing.assert_close(archive.load(path).program.module()(x)["mean"], model(x).detach())


def test_nothing_else_in_the_library_unpickles() -> None:
    """One call of torch.export.load, behind the checks, and no other way to objects of Python."""
    source = Path(pg.__file__).parent
    found = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(
            r"torch\.load\(|export\.load\(|import pickle|pickle\.load|allow_pickle|np\.load\(|joblib|marshal", line
        )
    ]
    assert [each.partition(":")[0] for each in found] == ["predictive/archive/files.py"], found
