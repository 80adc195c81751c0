"""The file behind the page to play with: a digit is known, clothes and noise are not."""

import json
from pathlib import Path

import numpy as np
import pytest

PLAY = Path(__file__).parents[2] / "docs" / "play"
onnxruntime = pytest.importorskip("onnxruntime")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def facts():
    return json.loads((PLAY / "digits.json").read_text())


@pytest.fixture(scope="module")
def answers(facts):
    """Plain and Bayesian probabilities, and uncertainty, of the thumbnails by kind, and of noise."""
    strip = np.asarray(Image.open(PLAY / "pictures.png"), dtype=np.float32) / 255
    tiles = np.stack(np.split(strip, strip.shape[1] // 28, axis=1))[:, None]
    kinds = np.array([picture["kind"] for picture in facts["pictures"]])
    images = {kind: tiles[kinds == kind] for kind in ("digit", "fashion")}
    images["noise"] = np.random.default_rng(0).random((20, 1, 28, 28), dtype=np.float32)
    session = onnxruntime.InferenceSession(PLAY / "digits.onnx")
    return {kind: _read(session, x) for kind, x in images.items()}


def _read(session, x):
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"x": x}), strict=True))
    mean, covariance = found["mean"], found["covariance"]
    plain = np.exp(mean - mean.max(-1, keepdims=True))
    plain /= plain.sum(-1, keepdims=True)
    # variances of differences, summed over all pairs, relative to the squared differences
    variances = np.einsum("nii->ni", covariance)
    pairs = variances[:, :, None] + variances[:, None] - 2 * covariance
    gaps = mean[:, :, None] - mean[:, None]
    return plain, found["probabilities"], np.sqrt(pairs.sum((1, 2)) / np.square(gaps).sum((1, 2)))


def test_digits_are_recognised_and_known(answers, facts):
    plain, bayesian, uncertainty = answers["digit"]
    assert list(plain.argmax(-1)) == list(bayesian.argmax(-1)) == list(range(10))
    assert bayesian.max(-1).mean() > 0.95
    assert np.median(uncertainty) < facts["usual"]


@pytest.mark.parametrize("kind", ["fashion", "noise"])
def test_what_is_no_digit_is_more_uncertain_than_digits_and_less_confident_than_the_plain_model(answers, facts, kind):
    plain, bayesian, uncertainty = answers[kind]
    assert (uncertainty > facts["usual"]).mean() > 0.9
    assert uncertainty.min() > np.median(answers["digit"][2])
    assert bayesian.max(-1).mean() < plain.max(-1).mean() - 0.05


def test_the_files_are_small():
    assert (PLAY / "digits.onnx").stat().st_size < 2_000_000
    assert (PLAY / "pictures.png").stat().st_size < 100_000


def test_the_numbers_on_the_page_are_those_of_the_file(facts):
    page = (PLAY / "index.md").read_text()
    named = [part.split('"')[0] for part in page.split('data-fact="')[1:]]
    assert named and set(named) <= set(facts["told"])
