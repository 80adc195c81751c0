"""The front door: importing costs next to nothing, and every public name leads somewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

import propagauss as pg

HEAVY = ("torch", "torch._dynamo", "scipy", "sklearn", "matplotlib", "pyarrow", "onnxruntime", "ray")
IMPORTING = "import propagauss"
HELP = """
from propagauss.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
"""


def _loaded_by(statements: str) -> set[str]:
    """Which of the heavy packages a new process has loaded after some statements."""
    report = f"import sys\nprint('\\nloaded', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{report}"], capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("statements", [IMPORTING, HELP], ids=["import propagauss", "propagauss --help"])
def test_nothing_heavy_is_imported(statements: str) -> None:
    assert _loaded_by(statements) == set()


def test_streamlining_needs_no_compiler_nor_plots() -> None:
    assert _loaded_by("import propagauss; propagauss.streamline") <= {"torch", "scipy"}


def test_all_is_what_there_is() -> None:
    assert sorted(pg.__all__) == sorted([*pg._HOMES, *pg._MODULES, "__version__"])
    assert dir(pg) == sorted(pg.__all__)


@pytest.mark.parametrize("name", pg.__all__)
def test_every_name_leads_somewhere(name: str) -> None:
    assert getattr(pg, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = pg.nothing_of_the_kind
