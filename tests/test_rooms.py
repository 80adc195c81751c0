"""The plan of the house: which room may import which, no cycles, small folders and short files."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from importlinter import cli

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "propagauss"
MODULES = 13  # in a folder, its __init__ included
LINES = 300
LONGER_FILES = 4  # so many may be


@pytest.mark.parametrize("contract", ["rooms", "cycles"])
def test_rooms_import_only_what_stands_below_them(contract: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.lint_imports(str(ROOT / "pyproject.toml"), limit_to_contracts=(contract,), no_cache=True, no_logo=True)
    assert code == cli.EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_no_module_imports_one_that_imports_it() -> None:
    """Beside what the contracts see, that is a module and its own package, as `posteriors.base` and `posteriors`."""
    graph = grimp.build_graph("propagauss", cache_dir=None)
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()


def test_folders_are_small() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    sizes = {str(folder.relative_to(PACKAGE)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: n for name, n in sizes.items() if n > MODULES} == {}


def test_few_files_are_long() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    longer = {name: n for name, n in lengths.items() if n > LINES}
    assert len(longer) <= LONGER_FILES, longer
