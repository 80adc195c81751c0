"""`python -m experiments NAME --quick`, from the command line, on made-up data in the layout of the real files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from experiments import datasets
from experiments.__main__ import main
from experiments.frame.experiment import Context, Experiment, Section, Unit
from experiments.frame.names import NAMES, experiment
from experiments.frame.run import run
from experiments.frame.store import Store
from experiments.report import numbers
from experiments.report.page import report

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick(name: str, quick: Callable[[str], tuple[Context, Path]]) -> None:
    context, results = quick(name)
    stored = {p: p.read_text() for p in (results / name / "quick").glob("*.json")}
    assert stored
    record = json.loads(next(iter(stored.values())))
    assert {"config", "seed", "versions", "results"} <= record.keys()
    page = (results / "report-quick.html").read_text()
    assert f'id="{name}"' in page and "nan" not in page.lower().split()
    if name == "runtime":  # the whole command once more; elsewhere only what it runs, as the report takes a while
        assert main([name, "--quick", "--data", str(context.data), "--results", str(results)]) == 0
    assert run(experiment(name), context, results) == 0  # nothing is run again
    assert {p: p.read_text() for p in stored} == stored


# -- the frame


def counting(calls: list[str], fail: str = "") -> Experiment:
    def unit(key: str) -> Unit:
        def work(context: Context) -> dict[str, Any]:
            calls.append(key)
            if key == fail:
                raise RuntimeError("stopped")
            return {"value": len(key)}

        return Unit(key, {"key": key, "sizes": (1, 2)}, work)

    return Experiment(
        "counting", "Counting", "no table", lambda c: [unit("a"), unit("bb"), unit("ccc")], lambda r: Section(str(r))
    )


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="stopped"):
        run(counting(calls, fail="bb"), Context("quick"), tmp_path)
    assert run(counting(calls), Context("quick"), tmp_path) == 2
    assert calls == ["a", "bb", "bb", "ccc"]
    assert run(counting(calls), Context("quick"), tmp_path) == 0
    assert run(counting(calls), Context("quick", seed=1), tmp_path) == 3  # another seed, other numbers
    assert run(counting(calls), Context("quick", seed=1), tmp_path, again=True) == 3


def test_broken_records_are_made_again(tmp_path: Path) -> None:
    calls: list[str] = []
    run(counting(calls), Context("quick"), tmp_path)
    file = tmp_path / "counting" / "quick" / "a.json"
    file.write_text(file.read_text()[:40])
    assert set(Store(tmp_path, "counting", "quick").records()) == {"bb", "ccc"}
    assert run(counting(calls), Context("quick"), tmp_path) == 1


def test_missing_data_is_named_with_where_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROPAGAUSS_DATA", raising=False)
    assert main(["mnist", "--quick", "--results", str(tmp_path / "a")]) == 1
    assert "--data" in capsys.readouterr().err
    command = ["mnist", "--quick", "--data", str(tmp_path), "--results", str(tmp_path / "b")]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "images/mnist.npz" in said and "LeCun" in said


def test_only_the_report_is_written(tmp_path: Path) -> None:
    assert main(["report", "--results", str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert report(tmp_path, "quick").name == "report-quick.html"


def test_without_a_name_what_is_stored_and_missing_is_listed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROPAGAUSS_DATA", raising=False)
    uci = experiment("uci").units(Context("full", data=data))
    for unit in uci[:-1]:
        Store(tmp_path, "uci", "full").put(unit, 0, 1.0, {})
    before = sorted(tmp_path.rglob("*"))
    assert main(["--data", str(data), "--results", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert set(lines) == set(NAMES)
    assert lines["uci"].endswith(f"{len(uci) - 1} stored  1 missing: {uci[-1].key}")
    assert "0 stored" in lines["rotated"] and "missing" in lines["rotated"]
    assert main(["--results", str(tmp_path)]) == 0
    assert "--data DIR" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


@pytest.mark.parametrize("arguments", [["ucii"], ["uci", "--quick", "--full"], ["uci", "--seed", "-1"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: python -m experiments" in capsys.readouterr().err


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([]) == 2
    assert capsys.readouterr().err == "python -m experiments: the experiments need matplotlib: pip install .[demo]\n"


# -- files


def test_images(data: Path) -> None:
    context = Context("quick", data=data)
    found = datasets.images(context, "cifar10", validation=100)
    assert found.train[0].shape == (1400, 3, 32, 32) and found.validation[0].shape == (100, 3, 32, 32)
    assert found.classes == 10 and found.test[0].max() <= 1
    assert datasets.images(context, "pneumoniamnist").validation[0].shape == (200, 1, 28, 28)


def test_medmnist_names_are_understood(data: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    x, y = np.zeros((6, 28, 28), np.uint8), np.arange(6, dtype=np.uint8)[:, None]
    arrays = {f"{part}_{kind}": a for part in ("train", "val", "test") for kind, a in (("images", x), ("labels", y))}
    np.savez(tmp_path / "images" / "organcmnist.npz", **arrays)
    found = datasets.images(Context("quick", data=tmp_path), "organcmnist")
    assert found.validation[1].tolist() == [0, 1, 2, 3, 4, 5] and found.classes == 6


def test_svhn(tmp_path: Path) -> None:
    from scipy.io import savemat

    (tmp_path / "images").mkdir()
    x = np.random.default_rng(0).integers(0, 255, (32, 32, 3, 5), dtype=np.uint8)
    savemat(tmp_path / "images" / "svhn_test_32x32.mat", {"X": x, "y": np.array([[1], [10], [3], [4], [5]])})
    images, labels = datasets.svhn(Context("quick", data=tmp_path))
    assert images.shape == (5, 3, 32, 32) and labels.tolist() == [1, 0, 3, 4, 5]


def test_tables_keep_text_and_gaps(tmp_path: Path) -> None:
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "am.csv").write_text("a,b,y\n1,x,2\n,z,3\n")
    table = datasets.uci(Context("quick", data=tmp_path), "am")
    assert table.names == ["a", "b"] and np.isnan(table.columns[0][1]) and table.columns[1].tolist() == ["x", "z"]


def test_a_file_of_another_form_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    np.savez(tmp_path / "images" / "mnist.npz", x=np.zeros(3))
    with pytest.raises(datasets.DataMissing, match="x_train"):
        datasets.images(Context("quick", data=tmp_path), "mnist")


# -- numbers within sentences


def test_numbers_in_pages_are_those_of_the_results() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    assert not any(re.search(r"^\s*<!-- number", text, re.MULTILINE) for text in texts)  # a block of HTML would begin
    found = {name: number for text in texts for name, number in numbers.shown(text).items()}
    assert found.keys() == numbers.NUMBERS.keys()
    coverage = float(found.pop("opening-inside").rstrip("%"))  # computed anew, so that it depends on the machine
    assert coverage == pytest.approx(float(numbers.number("opening-inside", ROOT / "results").rstrip("%")), abs=1.0)
    stale = {name: text for name, text in found.items() if text != numbers.number(name, ROOT / "results")}
    assert not stale, "python -m experiments.report.readme README.md (or the page in which the number stands)"


def test_a_page_with_a_number_that_nobody_knows() -> None:
    with pytest.raises(SystemExit, match="'answer'; there are opening-inside"):
        numbers.filled("x <!-- number: answer -->42<!-- /number -->", ROOT / "results")
