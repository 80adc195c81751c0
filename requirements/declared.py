"""Print the dependencies that pyproject.toml declares, for the extras named on the command line.

Those listed in requirements/*.txt are left out: they are installed with --no-deps, see there.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def name(requirement: str) -> str:
    """The normalised project name of a requirement such as 'torch>=2.9'."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group()).lower() if match else ""


def requirements(extra: str, extras: dict[str, list[str]]) -> list[str]:
    """Those of an extra; where it names extras of propagauss itself, theirs."""
    found = []
    for requirement in extras[extra]:
        own = re.fullmatch(r"propagauss\[([\w,-]+)\]", requirement)
        found += [r for e in own[1].split(",") for r in requirements(e, extras)] if own else [requirement]
    return found


def main(extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for path in ROOT.glob("requirements/*.txt") for line in path.read_text().splitlines()]
    without_deps = {name(line) for line in lines}
    declared = project["dependencies"] + [r for e in extras for r in requirements(e, project["optional-dependencies"])]
    print(*[r for r in declared if name(r) not in without_deps], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
