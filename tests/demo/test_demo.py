"""The demo end to end on its quick settings, and the parts that its fairness rests on."""

import base64
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import propagauss as pg
from propagauss import cli
from propagauss.baselines import MonteCarlo
from propagauss.demo import data
from propagauss.demo.compute import STEPS, Settings, compute
from propagauss.demo.methods import EXACT, OURS, Result, Sampler, best, chosen, fit_class_sampler, is_tied
from propagauss.demo.report import commentary, tables
from propagauss.demo.report.files import write
from propagauss.demo.timing import relative_times
from propagauss.demo.training import mlp, train, train_classifier

FILES = ["report.html", "results.json"]
STRUCTURES = ["diagonal", "kronecker", "full"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Exit code, what was printed, and the folder of one quick run."""
    folder = tmp_path_factory.mktemp("demo")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *a, **k: printed.append(" ".join(map(str, a))))
        code = cli.main(["demo", "--quick", "--seed", "3", "--out", str(folder / "out")])
    assert torch.get_num_threads() == threads
    return code, "\n".join(printed), folder / "out"


@pytest.fixture(scope="module")
def results(demo):
    return json.loads((demo[2] / "results.json").read_text())


def rows(results, study, **wanted):
    return [r for r in results[study]["results"] if all(r[k] == v for k, v in wanted.items())]


# -- what it prints and writes


def test_prints_a_table_for_each_data_set_and_the_path(demo):
    code, printed, folder = demo
    assert code == 0
    assert printed.rstrip().endswith(f"report: {folder / 'report.html'}")
    digits, diabetes = printed.index("\ndigits: "), printed.index("\ndiabetes: ")
    for table in (printed[digits:diabetes], printed[diabetes:]):
        lines = table.splitlines()
        assert sum(line.endswith(" *") for line in lines) == 1  # one best NLPD
        assert all(any(line.startswith(f"  {m}") for line in lines) for m in ("MAP", "sampling", EXACT, OURS))


def test_nothing_else_is_left(demo):
    assert sorted(p.name for p in demo[2].iterdir()) == ["bands.svg", "cost.svg", "opening.svg", *FILES]


def test_report_is_self_contained(demo):
    text = (demo[2] / "report.html").read_text()
    figures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    assert len(figures) == 5
    assert not re.search(r'(src|href)="(?!data:)|url\(|@import|<script|<link|https?://', text)
    for figure in figures:
        svg = base64.b64decode(figure).decode()
        outside = re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)  # names of the format, which are never fetched
        assert "http" not in outside and "#123456" not in svg
        assert "prefers-color-scheme:dark" in svg


def test_report_shows_plan_versions_and_seed(demo):
    text = (demo[2] / "report.html").read_text()
    assert "ops on uncertain values" in text and "6 random parameters" in text
    assert f"torch {torch.__version__}" in text and f"propagauss {pg.__version__}" in text and "seed 3" in text


# -- the numbers


def test_the_first_picture_is_unsure_between_and_away_from_the_data(results):
    found = results["opening"]
    assert 0.1 < found["noise"] < 0.25 and 0.9 < found["inside"] < 0.99
    assert found["between"] > 3 and found["away"] > 3


def test_all_numbers_are_finite(results):
    def check(value):
        if isinstance(value, dict):
            for v in value.values():
                check(v)
        elif isinstance(value, list):
            for v in value:
                check(v)
        elif isinstance(value, float):
            assert math.isfinite(value)

    check(results)
    for study, names in (("digits", {"accuracy", "nlpd", "ece"}), ("diabetes", {"nlpd", "rmse"})):
        assert all(set(r["metrics"]) == names for r in results[study]["results"])


@pytest.mark.parametrize("study", ["digits", "diabetes"])
@pytest.mark.parametrize("method", ["sampling", EXACT, OURS])
@pytest.mark.parametrize("posterior", STRUCTURES)
def test_every_method_comes_as_it_is_and_fitted(results, study, method, posterior):
    found = rows(results, study, method=method, posterior=posterior)
    assert {r["fitted"] for r in found} == {False, True}
    assert all((r["scale"] == 1) for r in found if not r["fitted"])
    if study == "digits":
        assert all(r["time"]["median"] > 0 for r in found)


def test_streamlined_mean_is_that_of_map(results):
    (base,) = rows(results, "digits", method="MAP")
    for row in rows(results, "digits", method=OURS, link="mean_field"):
        assert row["metrics"]["accuracy"] == pytest.approx(base["metrics"]["accuracy"], abs=0.005)
    (base,) = rows(results, "diabetes", method="MAP")
    for row in rows(results, "diabetes", method=OURS):
        assert row["metrics"]["rmse"] == pytest.approx(base["metrics"]["rmse"], rel=1e-5)


def test_same_seed_gives_the_same_numbers(results):
    state = torch.random.get_rng_state()
    steps: list[str] = []
    again = json.loads(json.dumps(compute(Settings.of(3, quick=True), steps.append).as_dict()))
    for study in ("digits", "diabetes"):
        for one, other in zip(results[study]["results"], again[study]["results"], strict=True):
            assert {k: v for k, v in one.items() if k != "time"} == {k: v for k, v in other.items() if k != "time"}
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(steps) == STEPS


# -- the parts


def test_splits_do_not_overlap():
    for split in (data.digits(1), data.diabetes(1), data.body_mass(1)):
        parts = [{tuple(row) for row in part[0].tolist()} for part in (split.train, split.validation, split.test)]
        if split.train[0].shape[1] > 1:  # the body mass index alone has repeated values
            assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
        assert sum(split.sizes.values()) == {64: 1797}.get(split.train[0].shape[1], 442)
        assert split.train[0].mean(0).abs().max() < 1e-4  # statistics of the training part


def test_gap_holds_the_test_part_only():
    split = data.body_mass(0)
    low, high = split.test[0].min(), split.test[0].max()
    for x, _ in (split.train, split.validation):
        assert not ((x > low) & (x < high)).any()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_sampler_is_monte_carlo(structure):
    split = data.diabetes(0)
    model = train(split, (10, 4, 1), "regression", epochs=2, seed=0, rounds=1)
    posterior = pg.fit_laplace(model, split.train_loader, "regression", structure, progress=False)
    sampler, reference = Sampler(model, posterior, 7, seed=5), MonteCarlo(model, posterior, 7, seed=5)
    x, y = split.test
    with torch.no_grad():
        assert torch.allclose(sampler.latents(x), reference.latents(x), atol=1e-6)
        expected = reference.regress(x, 0.7).log_prob(y)
        assert torch.allclose(sampler.log_density(x, y, 0.7), expected, atol=1e-5)
        scaled = MonteCarlo(model, posterior.scale(0.25), 7, seed=5)
        assert torch.allclose(sampler.rescaled(0.25).latents(x), scaled.latents(x), atol=1e-5)


def test_sampler_scale_is_fitted_to_what_it_is_given():
    torch.manual_seed(0)
    model = mlp((3, 4, 2)).eval()
    posterior = pg.DiagonalPosterior({n: torch.ones_like(p) for n, p in model.named_parameters()})
    x, y = torch.randn(50, 3), torch.randint(2, (50,))
    sampler = Sampler(model, posterior, 20, seed=0)

    def nlpd(scale):
        return pg.metrics.nlpd(sampler.rescaled(scale).log_probs(x), y)

    with torch.no_grad():
        fitted = fit_class_sampler(sampler, x, y)
        assert nlpd(fitted.scale) <= min(nlpd(s) for s in (1e-4, 1e-2, 0.1, 1.0, 10.0)) + 1e-6
        sampled = MonteCarlo(model, posterior, 20, seed=0).classify(x)
        assert torch.allclose(sampler.log_probs(x).exp(), sampled.probs, atol=1e-5)


def test_times_are_relative_to_the_reference():
    calls = {"one": lambda: sum(range(2000)), "ten": lambda: sum(range(20000))}
    ratios, seconds = relative_times(calls, "one", rounds=5)
    assert ratios["one"].median == 1 and seconds > 0
    assert 2 < ratios["ten"].median < 50
    assert ratios["ten"].low <= ratios["ten"].median <= ratios["ten"].high


def result(method, losses, **more):
    losses = torch.tensor(losses)
    return Result(method, metrics={"nlpd": losses.mean().item(), "rmse": 1.0}, losses=losses, **more)


def test_marks_tell_ties_from_differences():
    found = [
        result("MAP", [1.0, 1.1, 0.9, 1.0], noise=1.0),
        result(EXACT, [0.9, 1.2, 0.8, 1.05], noise=1.0),
        result(OURS, [2.0, 2.1, 1.9, 2.05], noise=1.0),
    ]
    assert best(found) is found[1] and is_tied(found[0], found[1])
    assert tables.marks(found) == ["~", "*", " "]
    table = tables.text(found, tables.REGRESSION).splitlines()
    assert len(table) == 5 and table[3].endswith("*")


def test_the_prior_is_the_best_of_the_plain_network_on_validation_data(results):
    tried = results["digits"]["validation_nlpd_by_prior"]
    (base,) = rows(results, "digits", method="MAP")
    assert list(map(float, tried)) == list(Settings().digits_priors)
    assert base["validation_nlpd"] == pytest.approx(min(tried.values()), rel=1e-5)


def test_no_choice_depends_on_the_test_part():
    split = data.digits(0)
    x, y = split.test
    other = replace(split, test=(torch.randn_like(x), y.flip(0)))
    (one, found), (two, again) = (train_classifier(s, (64, 6, 10), 2, 0, (0.1, 1.0)) for s in (split, other))
    assert found == again
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_variants_are_chosen_on_the_validation_part():
    found = [
        result("MAP", [1.0, 1.1, 0.9, 1.0], fitted=True, validation=0.9),
        result(OURS, [0.5, 0.6, 0.4, 0.55], posterior="full", scale=0.5, fitted=True, validation=1.2),
        result(OURS, [2.0, 2.1, 1.9, 2.05], posterior="diagonal", scale=0.5, fitted=True, validation=1.1),
    ]
    assert chosen(found[1:]) is found[2] and best(found[1:]) is found[1]
    said = " ".join(commentary.verdict(found))
    assert "least NLPD is that of MAP" in said and "diagonal" in said and "full" not in said


def test_commentary_names_the_prior_and_what_was_tried():
    said = commentary.prior({0.1: 0.3, 1.0: 0.2, 3.0: 0.25})
    assert "prior precision of 1," in said and "0.1: 0.300, 1: 0.200, 3: 0.250" in said


def test_commentary_says_when_ours_loses_and_when_it_wins():
    def found(ours):
        return [
            result("MAP", [1.0, 1.1, 0.9, 1.0], fitted=True),
            result(OURS, ours, posterior="full", scale=0.5, fitted=True),
        ]

    losing, winning = (" ".join(commentary.verdict(found(x))) for x in ([2.0, 2.1, 1.9, 2.05], [0.5, 0.6, 0.4, 0.55]))
    assert "least NLPD is that of MAP: 1.000" in losing and "worse by 1.013" in losing
    assert f"least NLPD is that of {OURS} (full posterior): 0.512" in winning and "better by 0.488" in winning


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write(path, "old")

    def fail(source, target):
        raise OSError("disk is full")

    monkeypatch.setattr("propagauss.demo.report.files.os.replace", fail)
    with pytest.raises(OSError, match="full"):
        write(path, "new")
    assert path.read_text() == "old" and list(Path(tmp_path).iterdir()) == [path]
