"""One word for one thing: what docs/glossary.md says to avoid is found nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = "docs/glossary.md"
FOLDERS = ("src", "docs", "experiments", "benchmarks")
SUFFIXES = (".py", ".md")

# Whatever stands between the words is any white space: sentences go on in the next line.
AVOIDED = {
    "spread": r"spread",
    "thin": r"(?<![a-z])thin(?![a-z])",
    "by their mean": r"(?<![a-z])by[\s_]+(?:their[\s_]+)?mean(?![a-z])",
    "plain network": r"\b(?:plain|MAP)\s+network",
}
ALLOWED = {
    ("spread", "experiments/uci/methods.py"): 1,  # names in stored results
    ("spread", "experiments/cost/mc_curves.py"): 2,
    ("thin", "experiments/mnist/rotated.py"): 1,  # lines of a plot
}


def texts() -> Iterator[tuple[str, str]]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    for path in pages + files:
        name = path.relative_to(ROOT).as_posix()
        if name != GLOSSARY:
            yield name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("word", AVOIDED)
def test_avoided_words_are_not_used(word: str) -> None:
    found = {}
    for name, text in texts():
        lines = [text.count("\n", 0, m.start()) + 1 for m in re.finditer(AVOIDED[word], text, re.IGNORECASE)]
        if len(lines) > ALLOWED.get((word, name), 0):
            found[name] = lines
    assert found == {}, f"see “Words that we avoid” in {GLOSSARY}"


@pytest.mark.parametrize("word", AVOIDED)
def test_the_glossary_names_them(word: str) -> None:
    avoided = (ROOT / GLOSSARY).read_text(encoding="utf-8").split("## Words that we avoid")[1].split("\n## ")[0]
    assert re.search(AVOIDED[word], avoided)
