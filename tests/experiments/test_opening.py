"""What the report opens with."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from experiments.report.opening import PICTURES, opening

RESULTS = Path(__file__).parents[2] / "results"


def test_it_opens_with_three_pictures_and_a_sentence_below_each():
    found = opening(RESULTS, "full")
    assert found.count("<img") == found.count("<figcaption>") == 3
    sentences = [part.split("</figcaption>")[0] for part in found.split("<figcaption>")[1:]]
    assert all(sentence.endswith(".") and any(c.isdigit() for c in sentence) for sentence in sentences)


def test_it_shows_what_is_stored_and_nothing_else(tmp_path):
    assert opening(tmp_path, "full") == ""
    (tmp_path / "runtime").symlink_to(RESULTS / "runtime")
    assert opening(tmp_path, "full").count("<img") == 1
    assert all(picture({}) is None for picture in PICTURES.values())
