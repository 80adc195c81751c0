"""What is installed: the library and its demo, none of the paper's experiments."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OUTSIDE = {"experiments", "benchmarks", "tests", "docs", "results", "requirements"}
BUILDS = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
IMPORT = """
import importlib.metadata, pathlib
import propagauss as pg
from propagauss.cli import main
print(pathlib.Path(pg.__file__).parent.parent, pg.__version__, importlib.metadata.version("propagauss"))
assert all(getattr(pg, name) is not None for name in pg.__all__)
"""


def _wheel(source: Path, folder: Path) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    return Path(next(WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, as pip unpacks it."""
    from hatchling.builders.sdist import SdistBuilder

    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(archive) as files:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and later have it
        files.extractall(folder, **safely)
    return folder / f"propagauss-{PROJECT['version']}"


def _files(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


@BUILDS
def test_only_the_library_is_in_the_wheel(wheel: Path) -> None:
    files = _files(wheel)
    about = f"propagauss-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in files} == {"propagauss", about}
    assert {"propagauss/py.typed", "propagauss/demo/run.py", f"{about}/licenses/LICENSE"} <= files
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources == {name for name in files if name.endswith(".py")}
    assert not [name for name in files if OUTSIDE & set(Path(name).parts)]


@BUILDS
def test_the_source_distribution_makes_the_same_wheel(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    assert _files(_wheel(unpacked, tmp_path)) == _files(wheel)
    assert {"LICENSE", "CITATION.cff", "CHANGELOG.md", "README.md", "tests"} <= {p.name for p in unpacked.iterdir()}
    assert not {".venv", "results", "docs", "site"} & {p.name for p in unpacked.iterdir()}


@BUILDS
def test_what_pip_installs_can_be_imported(wheel: Path, tmp_path: Path) -> None:
    """Into a folder of its own, beside the libraries that are here."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path), str(wheel)], check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(tmp_path), PROJECT["version"], PROJECT["version"]]
    assert (tmp_path / "bin" / "propagauss").exists()


def test_no_source_of_the_library_is_an_experiment() -> None:
    sources = (ROOT / "src").rglob("*.py")
    assert not [path for path in sources if "EXPERIMENT" in path.read_text()]  # what every experiment offers


def test_the_library_imports_nothing_from_outside_the_wheel() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not OUTSIDE & {name.split(".")[0] for name in names}, path


def test_the_citation_is_complete_and_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format asks for
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert paper["type"] == "conference-paper" and len(paper["authors"]) == 4


def test_the_torch_that_is_declared_is_the_one_that_is_tested() -> None:
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    (declared,) = [r for r in PROJECT["dependencies"] if r.startswith("torch>")]
    assert declared.startswith(f"torch>={pinned},<")
    assert f"| torch | {pinned}," in (ROOT / "docs" / "install.md").read_text()
