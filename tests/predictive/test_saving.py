"""A predictor from a file is the one that was saved, without the class of the model; hostile files are refused."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import propagauss as pg
from predictive import hostile
from propagauss.baselines import MAP
from propagauss.likelihoods import ExponentialLikelihood, PoissonLikelihood
from propagauss.predict import predict
from propagauss.predictive import archive
from propagauss.predictive.predictor import Predictor

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
DETAILS = "extra/propagauss.json"


class Masked(nn.Module):
    """Named inputs, one of them a number that is built in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor, power: int = 1) -> Tensor:
        return self.layer(x) * mask**power


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, pair: list[Tensor], more: dict[str, Tensor]) -> Tensor:
        return self.layer(pair[0] + pair[1] + more["b"]) - self.layer(more["a"])


torch.manual_seed(0)
X, Y = torch.randn(9, 4), torch.randint(0, 3, (9,))
MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


TWO = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
PIXELS = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
IMAGES = torch.randn(9, 1, 5, 5)
FITTED = pg.fit_laplace(MODEL, [(X, torch.randn(9, 3))], likelihood="regression", progress=False)


def posterior(model: nn.Module) -> pg.Posterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, 5e-2) for n, p in model.named_parameters()})


def streamlined(**options: Any) -> pg.Streamlined:
    return pg.streamline(MODEL, posterior(MODEL), X[:2], **options)


def linearised(**options: Any) -> pg.Streamlined:
    return pg.linearise(MODEL, posterior(MODEL), X[:2], **options)


def of(model: nn.Module, example: Any) -> pg.Streamlined:
    return pg.streamline(model.eval(), posterior(model), example)


SEVERAL = torch.tensor([0.1, 0.2, 0.3])
CASES: dict[str, tuple[Callable[[], Predictor], Any]] = {
    "classifier": (lambda: pg.Classifier(streamlined(), scale=0.3), X),
    "mean field": (lambda: pg.Classifier(streamlined(covariance="full"), link="mean_field"), X),
    "draws": (lambda: pg.Classifier(linearised(), link="monte_carlo", samples=64, seed=3), X),
    "chosen": (lambda: pg.Classifier(linearised(outputs=2)), X),
    "chosen variances": (lambda: pg.Classifier(linearised(outputs=2, covariance="diagonal")), X),
    "regressor": (lambda: pg.Regressor(streamlined(), noise=0.1, scale=2.0), X),
    "several noises": (lambda: pg.Regressor(linearised(), noise=SEVERAL), X),
    "yes or no": (lambda: pg.BinaryClassifier(streamlined(), link="quadrature", temperature=1.7), X),
    "temperature": (lambda: pg.Classifier(streamlined(), temperature=1.3, ignore_index=-1), X),
    "pixels": (lambda: pg.Classifier(of(PIXELS, IMAGES[:2]), class_dim=1), IMAGES),
    "fitted noise": (lambda: pg.Regressor(pg.streamline(MODEL, FITTED, X[:2])), X),
    "noise for each input": (lambda: pg.HeteroscedasticRegressor(of(TWO, X[:2]), noise_factor=1.5), X),
    "counts": (lambda: Predictor(streamlined(), PoissonLikelihood(), scale=0.5), X),
    "times": (lambda: Predictor(streamlined(), ExponentialLikelihood()), X),
    "plain model": (lambda: pg.Classifier(pg.streamline(MODEL, None, X[:2])), X),
    "names": (
        lambda: pg.Classifier(of(Masked(), {"x": X[:2], "mask": X[:2, :1], "power": 2})),
        {"x": X, "mask": X[:, :1], "power": 2},
    ),
    "nested": (
        lambda: pg.Classifier(of(Nested(), ([X[:2], X[:2]], {"b": X[:2], "a": X[:2]}))),
        ([X, -X], {"b": X, "a": X}),
    ),
    "uncertain input": (
        lambda: pg.Classifier(of(MODEL, pg.Gaussian(X[:2], variance=X[:2].square()))),
        pg.Gaussian(X, variance=X.square()),
    ),
    "double precision": (lambda: pg.Classifier(streamlined().double()), X.double()),
}


def latents(predictor: Predictor, x: Any) -> tuple[Tensor, Tensor]:
    found = predictor.latent(x)
    return found.mean, found.variance


@pytest.mark.parametrize("case", CASES)
def test_the_same_predictor(case: str, tmp_path: Path) -> None:
    make, x = CASES[case]
    predictor = make()
    loaded = pg.load(predictor.save(tmp_path / "p.pt2"))
    assert type(loaded) is type(predictor) and loaded.scale == predictor.scale
    for found, expected in zip(latents(loaded, x), latents(predictor, x), strict=True):
        torch.testing.assert_close(found, expected)
    found, expected = loaded(x), predictor(x)
    assert type(found) is type(expected)
    for name in ("probs",) if isinstance(predictor, pg.Classifier) else ("mean", "variance"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    for part, other in zip(loaded.decompose(x), predictor.decompose(x), strict=True):
        torch.testing.assert_close(part, other)
    assert str(loaded.net.plan) == str(predictor.net.plan)
    assert loaded.extra_repr() == predictor.extra_repr()
    again = pg.load(loaded.save(tmp_path / "again.pt2"))
    for found, expected in zip(latents(again, x), latents(loaded, x), strict=True):
        assert torch.equal(found, expected)


def test_any_batch_size_and_whole_data_sets(tmp_path: Path) -> None:
    predictor = pg.Classifier(streamlined())
    loaded = pg.load(predictor.save(tmp_path / "p.pt2"))
    for rows in (1, 2, 7):
        torch.testing.assert_close(loaded(X[:rows]).probs, predictor(X[:rows]).probs)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    np.testing.assert_allclose(loaded.predict(loader).epistemic, predictor.predict(loader).epistemic, atol=1e-6)
    table = loaded.predict({"x": X}) if loaded.net.takes.names else loaded.predict(X.numpy())
    assert len(table) == 9


def test_large_batches_go_through_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = linearised()
    net._at_once = 2
    loaded = pg.load(pg.Classifier(net).save(tmp_path / "p.pt2"))
    assert loaded.net.at_once == 2
    torch.testing.assert_close(loaded.net(X).covariance, net(X).covariance)


def test_a_loaded_predictor_calibrates_and_exports(tmp_path: Path) -> None:
    predictor = pg.Classifier(streamlined())
    loaded = pg.load(predictor.save(tmp_path / "p.pt2")).eval().train()
    data = [(X, Y)]
    predictor.fit_scale(data, progress=False)
    loaded.fit_scale(data, progress=False)
    assert loaded.scale == pytest.approx(predictor.scale, rel=1e-4)
    exported = archive.load(loaded.export(tmp_path / "e.pt2")).program.module()(X)
    torch.testing.assert_close(exported["probabilities"], predictor(X).probs, rtol=1e-4, atol=1e-5)
    loaded.export(tmp_path / "e.onnx")
    noisy = pg.load(pg.Regressor(streamlined(), noise=0.1).save(tmp_path / "r.pt2"))
    noisy.fit_scale([(X, torch.randn(9, 3))], fit_noise=True, progress=False)  # type: ignore[call-arg]
    assert pg.load(noisy.save(tmp_path / "r2.pt2")).scale == noisy.scale


def test_what_calibrate_found_is_saved(tmp_path: Path) -> None:
    x = 3 * torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    data = [(x, torch.multinomial(MODEL(x).softmax(-1), 1).squeeze(-1))]
    classifier = pg.Classifier(streamlined()).calibrate(data, progress=False)
    loaded = pg.load(classifier.save(tmp_path / "p.pt2"))
    assert isinstance(loaded, pg.Classifier)
    assert (loaded.temperature, loaded.scale) == (classifier.temperature, classifier.scale)
    again = loaded.calibrate(data, progress=False)
    assert again.temperature == pytest.approx(classifier.temperature, rel=1e-3)


def test_no_class_of_the_model_is_needed(tmp_path: Path) -> None:
    """Nor anything else of this process."""
    predictor = pg.Classifier(of(Masked(), {"x": X[:2], "mask": X[:2, :1]}))
    predictor.save(tmp_path / "p.pt2")
    np.save(tmp_path / "x.npy", X.numpy())
    code = (
        "import sys, numpy as np, torch, propagauss as pg\n"
        "x = torch.from_numpy(np.load('x.npy'))\n"
        "np.save('found.npy', pg.load('p.pt2')(x=x, mask=x[:, :1]).probs)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), predictor(x=X, mask=X[:, :1]).probs, atol=1e-6)


@pytest.mark.parametrize("case", ["classifier", "yes or no", "regressor", "noise for each input", "counts"])
def test_the_command_takes_the_file(case: str, tmp_path: Path) -> None:
    predictor = CASES[case][0]()
    np.save(tmp_path / "x.npy", X.numpy())
    tables = []
    for name, write in (("saved", predictor.save), ("exported", predictor.export)):
        out = tmp_path / f"{name}.parquet"
        predict(write(tmp_path / f"{name}.pt2"), tmp_path / "x.npy", out, progress=False)
        tables.append(parquet.read_table(out))
    saved, exported = tables
    assert saved.column_names == exported.column_names
    for name in saved.column_names:
        np.testing.assert_allclose(saved[name].to_numpy(), exported[name].to_numpy(), atol=1e-6)


@pytest.mark.parametrize("change", [lambda p: p.double(), lambda p: p.half(), lambda p: p.to("meta")])
def test_a_program_keeps_its_precision_and_device(change: Callable[[Any], Any], tmp_path: Path) -> None:
    loaded = pg.load(pg.Classifier(streamlined()).save(tmp_path / "p.pt2"))
    with pytest.raises(pg.InputError, match="keeps its precision and its device"):
        change(loaded)
    torch.testing.assert_close(loaded.to("cpu").float()(X).probs, pg.Classifier(streamlined())(X).probs)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pg.Classifier(streamlined()).save(tmp_path / "p.pt2")
    before = path.read_bytes()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "write", full)
    with pytest.raises(pg.InputError, match=r"cannot write .* No space left"):
        pg.Classifier(streamlined(), scale=3.0).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# -- what cannot be saved or loaded

BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "baseline": (lambda p: pg.Classifier(MAP(MODEL)).save(p / "p.pt2"), "not of a MAP: use pg.streamline"),
    "no noise": (lambda p: pg.Regressor(streamlined()).save(p / "p.pt2"), r"noise .* is not known.*noise=\.\.\."),
    "ending": (lambda p: pg.Classifier(streamlined()).save(p / "p.pt"), r"must end in \.pt2"),
    "folder": (lambda p: pg.Classifier(streamlined()).save(p / "no" / "p.pt2"), "there is no folder"),
    "path": (lambda p: pg.Classifier(streamlined()).save(3), "path to save to is 3"),  # type: ignore[arg-type]
    "no file": (lambda p: pg.load(p / "p.pt2"), "there is no file"),
    "a folder": (lambda p: pg.load(p), "is not a file"),
    "no path": (lambda p: pg.load(None), "path to load from is None"),  # type: ignore[arg-type]
    "exported": (
        lambda p: pg.load(pg.Classifier(streamlined()).export(p / "e.pt2")),
        r"e\.pt2 was written by export.*predictor\.save",
    ),
    "full input": (
        lambda p: pg.load(CASES["uncertain input"][0]().save(p / "p.pt2"))(
            pg.Gaussian(X, covariance=torch.eye(4).expand(9, 4, 4))
        ),
        "takes independent inputs",
    ),
    "width": (lambda p: pg.load(pg.Classifier(streamlined()).save(p / "p.pt2"))(X[:, :2]), r"shape \(9, 2\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case: str, tmp_path: Path) -> None:
    make, match = BAD[case]
    with pytest.raises(pg.InputError, match=match):
        make(tmp_path)


def test_a_likelihood_of_ones_own_has_to_be_registered(tmp_path: Path) -> None:
    class Mine(PoissonLikelihood):
        name = "mine"

    with pytest.raises(pg.InputError, match="likelihood='mine' is not registered"):
        Predictor(streamlined(), Mine()).save(tmp_path / "p.pt2")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> hostile.Entries:
    return hostile.entries(pg.Classifier(streamlined()).save(tmp_path_factory.mktemp("good") / "m.pt2"))


def state(found: hostile.Entries) -> Any:
    return json.loads(json.loads(found[DETAILS])[archive.SAVED])


def with_state(found: hostile.Entries, text: str) -> hostile.Entries:
    details = json.loads(found[DETAILS])
    return found | {DETAILS: json.dumps(details | {archive.SAVED: text}).encode()}


@pytest.mark.parametrize("name", hostile.CODE)
def test_no_file_runs_code(name: str, good: hostile.Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile_module", raising=False)
    path, marker, found = tmp_path / "m.pt2", tmp_path / "marker", dict(good)
    hostile.CODE[name](found, marker)
    hostile.write(path, found)
    if name == "guard that is Python":  # guards are left out
        assert pg.load(path).latent(X).shape == (9, 3)
    else:
        with pytest.raises(pg.InputError, match=r"m\.pt2 is refused, since"):
            pg.load(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", hostile.ODD)
def test_odd_files_are_refused(name: str, good: hostile.Entries, tmp_path: Path) -> None:
    path, found = tmp_path / "m.pt2", dict(good)
    hostile.ODD[name](found, tmp_path / "marker")
    hostile.write(path, found)
    with pytest.raises(pg.InputError, match=r"m\.pt2 is refused"):
        pg.load(path)
    assert not (tmp_path / "marker").exists()


TEXTS = {
    "no JSON": "{",
    "deep": "[" * 100_000,
    "deep inputs": json.dumps({"version": 1}) + "x",
    "a list": "[]",
    "nothing": "null",
    "a number": "1",
    "no version": "{}",
    "NaN": '{"version": NaN}',
    "many digits": '{"version": ' + "9" * 10_000 + "}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_no_state(name: str, good: hostile.Entries, tmp_path: Path) -> None:
    hostile.write(tmp_path / "m.pt2", with_state(good, TEXTS[name]))
    with pytest.raises(pg.InputError, match=r"m\.pt2 is refused.*save the predictor again"):
        pg.load(tmp_path / "m.pt2")


def deep(levels: int) -> Any:
    inner: Any = 0
    for _ in range(levels):
        inner = {"tuple": [inner]}
    return inner


SLOT = {"name": "x0", "uncertain": False, "dtype": "float32", "sizes": [None, 4], "example": [2, 4]}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "version": lambda s: s.update(version=2),
    "unknown part": lambda s: s.update(code="import os"),
    "unknown likelihood": lambda s: s.update(likelihood="os.system"),
    "likelihood of another type": lambda s: s.update(likelihood=["classification"]),
    "other likelihood": lambda s: s.update(likelihood="regression"),
    "predictor of another type": lambda s: s.update(predictor={}),
    "zero scale": lambda s: s.update(scale=0.0),
    "negative scale": lambda s: s.update(scale=-1.0),
    "huge scale": lambda s: s.update(scale=10**400),
    "text as scale": lambda s: s.update(scale="1"),
    "flag as scale": lambda s: s.update(scale=True),
    "no scale": lambda s: s.update(scale=None),
    "unknown link": lambda s: s["numbers"].update(link="os.system"),
    "link of another type": lambda s: s["numbers"].update(link=3),
    "no link": lambda s: s["numbers"].pop("link"),
    "further number": lambda s: s["numbers"].update(x=1),
    "huge draws": lambda s: s["numbers"].update(samples=10**15),
    "negative draws": lambda s: s["numbers"].update(samples=-5),
    "draws that are a tensor": lambda s: s["numbers"].update(samples={"tensor": [1.0, 2.0]}),
    "negative tensor": lambda s: s["numbers"].update(samples={"tensor": [-1.0]}),
    "nested tensor": lambda s: s["numbers"].update(samples={"tensor": [[1.0]]}),
    "object": lambda s: s["numbers"].update(samples={"__class__": "x"}),
    "infinite": lambda s: s["numbers"].update(seed=1e999),
    "no slots": lambda s: s.update(slots=[]),
    "slots of another type": lambda s: s.update(slots=3),
    "two slots": lambda s: s.update(slots=[SLOT, SLOT], args={"tuple": [0, 1]}),
    "slots that share": lambda s: s.update(args={"tuple": [0, 0]}),
    "slot that is not there": lambda s: s.update(args={"tuple": [7]}),
    "huge slot": lambda s: s.update(args={"tuple": [10**30]}),
    "slot that is a text": lambda s: s.update(slots=["x"]),
    "other type": lambda s: s["slots"][0].update(dtype="float64"),
    "unknown type": lambda s: s["slots"][0].update(dtype="os"),
    "type of another type": lambda s: s["slots"][0].update(dtype=7),
    "other sizes": lambda s: s["slots"][0].update(sizes=[None, 5]),
    "huge sizes": lambda s: s["slots"][0].update(sizes=[None, 10**30]),
    "negative sizes": lambda s: s["slots"][0].update(sizes=[None, -4]),
    "sizes that are texts": lambda s: s["slots"][0].update(sizes=["s0", 4]),
    "short example": lambda s: s["slots"][0].update(example=[2]),
    "literal": lambda s: s.update(slots=[{"name": "x", "literal": True, "value": 3}]),
    "odd literal": lambda s: s.update(slots=[{"name": "x", "literal": 1, "value": {}}]),
    "uncertain": lambda s: s["slots"][0].update(uncertain=True),
    "uncertain of another type": lambda s: s["slots"][0].update(uncertain="yes"),
    "deep nesting": lambda s: s.update(args=deep(100)),
    "object as inputs": lambda s: s.update(args={"os.system": ["x"]}),
    "names in a row": lambda s: s.update(args={"dict": {"x": 0}}),
    "row by names": lambda s: s.update(args={"tuple": []}, kwargs={"tuple": [0]}),
    "no samples": lambda s: s.update(at_once=0),
    "huge samples": lambda s: s.update(at_once=10**30),
    "plan that is a text": lambda s: s.update(plan="x"),
    "step that is a text": lambda s: s["plan"].update(steps=["x"]),
    "short step": lambda s: s["plan"]["steps"][0].pop(),
    "number in a step": lambda s: s["plan"]["steps"][0].__setitem__(0, 3),
    "long text": lambda s: s["plan"]["steps"][0].__setitem__(0, "x" * 100_000),
    "negative plan": lambda s: s["plan"].update(untouched=-1),
    **{f"without {n}": lambda s, n=n: s.pop(n) for n in ("predictor", "numbers", "slots", "args", "plan", "at_once")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_states_that_do_not_fit(name: str, good: hostile.Entries, tmp_path: Path) -> None:
    found = state(good)
    CHANGES[name](found)
    hostile.write(tmp_path / "m.pt2", with_state(good, json.dumps(found)))
    with pytest.raises(pg.InputError, match=r"m\.pt2 is refused.*save the predictor again"):
        pg.load(tmp_path / "m.pt2")


def test_a_state_beside_another_program(good: hostile.Entries, tmp_path: Path) -> None:
    """The program of an exported file does not return a latent."""
    exported = hostile.entries(pg.Classifier(streamlined()).export(tmp_path / "e.pt2"))
    hostile.write(tmp_path / "m.pt2", with_state(exported, json.dumps(state(good))))
    with pytest.raises(pg.InputError, match="does not return a latent"):
        pg.load(tmp_path / "m.pt2")


def test_states_changed_at_random(good: hostile.Entries, tmp_path: Path) -> None:
    """Each loads as a predictor or is refused; no other error."""
    rng, text = random.Random(0), json.dumps(state(good))
    pieces = ["null", "-1", "1e999", '"x"', "[]", "{}", "true", "0", '"\\u0000"', "99999999999999999999"]
    for _ in range(60):
        at = rng.randrange(len(text))
        changed = text[:at] + rng.choice([*pieces, ""]) + text[at + rng.randrange(1, 6) :]
        hostile.write(tmp_path / "m.pt2", with_state(good, changed))
        with contextlib.suppress(pg.InputError):
            pg.load(tmp_path / "m.pt2")


# -- pickles and copies


@pytest.mark.parametrize("make", [streamlined, linearised, lambda: pg.Classifier(streamlined()), "saved"])
def test_pickles_name_save_and_load_and_copies_work(make: Any, tmp_path: Path) -> None:
    thing = pg.load(pg.Classifier(streamlined()).save(tmp_path / "p.pt2")) if make == "saved" else make()
    for store in (lambda: pickle.dumps(thing), lambda: torch.save(thing, io.BytesIO())):
        with pytest.raises(pg.InputError, match=r"cannot be pickled.*predictor\.save\('p\.pt2'\).*pg\.load"):
            store()

    def latent(t: Any) -> pg.Gaussian:
        return t.latent(X) if isinstance(t, Predictor) else t(X)

    for same in (copy.deepcopy(thing), copy.copy(thing)):
        assert torch.equal(latent(same).variance, latent(thing).variance)
    apart = copy.deepcopy(thing)
    for buffer in apart.buffers():
        buffer.zero_()
    assert (latent(thing).variance > 0).all()
    file = io.BytesIO()
    torch.save(thing.state_dict(), file)
    thing.load_state_dict(torch.load(io.BytesIO(file.getvalue())))


class Predicted(Dataset[Tensor]):
    """A data set whose entries a network computes."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Tensor:
        return self.net(X[i : i + 1]).variance[0].detach()


def test_workers_of_a_loader() -> None:
    net = streamlined()
    loader = DataLoader(Predicted(net), batch_size=3, num_workers=1, multiprocessing_context="fork")
    torch.testing.assert_close(torch.cat(list(loader)), net(X).variance)
