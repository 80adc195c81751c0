"""What is installed: the library and its demo, none of the paper's experiments."""

import ast
import importlib.util
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"experiments", "benchmarks", "tests", "docs", "results", "requirements"}


def _built(folder: Path) -> list[str]:
    """The files of the wheel that hatchling builds."""
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


def _declared() -> list[str]:
    """The same from what pyproject.toml says, for environments without hatchling."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert set(build) == {"targets"} and set(build["targets"]["wheel"]) == {"packages"}  # nothing else adds files
    packages = [ROOT / package for package in build["targets"]["wheel"]["packages"]]
    files = [(package, path) for package in packages for path in package.rglob("*") if path.is_file()]
    return [path.relative_to(package.parent).as_posix() for package, path in files if "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if importlib.util.find_spec("hatchling") is None:
        return _declared()
    return _built(tmp_path_factory.mktemp("wheel"))


def test_only_the_library_is_in_the_wheel(files: list[str]) -> None:
    assert {name.split("/")[0] for name in files} == {"propagauss"}
    assert {"propagauss/__init__.py", "propagauss/cli.py", "propagauss/demo/run.py"} <= set(files)


def test_no_experiment_is_in_the_wheel(files: list[str]) -> None:
    assert not [name for name in files if OUTSIDE & set(Path(name).parts)]
    sources = [ROOT / "src" / name for name in files if name.endswith(".py")]
    assert not [path for path in sources if "EXPERIMENT" in path.read_text()]  # what every experiment offers


def test_the_library_imports_nothing_from_outside_the_wheel() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not OUTSIDE & {name.split(".")[0] for name in names}, path
