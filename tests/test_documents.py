"""Every Python block of README, CONTRIBUTING and docs runs, in order, and prints what the page shows."""

import re
from pathlib import Path

import pytest

import propagauss
from documents import FIGURE, ROOT, alike, blocks, check, pages, says


def _parameter(page: Path):
    marks = [pytest.mark.slow] if says(page, "slow") else []
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.parametrize("page", [_parameter(page) for page in pages()])
def test_a_page_runs_and_prints_what_it_shows(page):
    check(page)


def test_the_first_example_does_not_depend_on_its_seed(capsys):
    """A tuned model is less often sure of digits that it has never seen, and almost as often of the others."""
    first = next(b.text for b in blocks((ROOT / "README.md").read_text()) if b.language == "python")
    assert "manual_seed(0)" in first
    exec(first.replace("manual_seed(0)", "manual_seed(1)"), {"__name__": "__main__"})
    *_, seen, unseen = capsys.readouterr().out.strip().splitlines()
    (plain, tuned), (sure, less) = ([int(n) for n in re.findall(r"(\d+)%(?! sure)", row)] for row in (seen, unseen))
    assert plain > 85 and tuned > plain - 10 and less < sure - 5


def test_the_pages_that_newcomers_read_are_among_those_that_run():
    run_here = {str(page.relative_to(ROOT)) for page in pages()}
    assert {"README.md", "CONTRIBUTING.md", "docs/index.md", "docs/tutorial.md", "docs/how-to/tasks.md"} <= run_here


def test_few_blocks_are_left_out_and_each_says_why():
    left_out = [b.mark for page in pages() for b in blocks(page.read_text()) if b.mark.startswith("not run")]
    assert len(left_out) <= 3 and all(len(mark) > len("not run: ") + 10 for mark in left_out)


def test_code_fits_beside_the_navigation():
    """Long lines of code would have to be scrolled on a screen of 1,280 pixels."""
    for page in pages():
        code = [b for b in blocks(page.read_text()) if b.language == "python"]
        assert not [(page.name, line) for b in code for line in b.text.splitlines() if len(line) > 82]


def test_figures_of_the_gallery_are_small_and_come_from_its_code():
    """What a page shows it also saves; `make gallery` puts that into its folder of images."""
    gallery = ROOT / "docs" / "gallery"
    shown = {page: FIGURE.findall(page.read_text()) for page in gallery.glob("*.md")}
    for page, names in shown.items():
        assert page.name == "index.md" or all(f'savefig("{name}")' in page.read_text() for name in names), page.name
    files = {path.name: path.stat().st_size for path in (gallery / "images").iterdir()}
    assert set(files) == {name for names in shown.values() for name in names} == set(shown[gallery / "index.md"])
    assert max(files.values()) < 60_000


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: propagauss\.(\S+)$", page, re.M))
    modules = {"baselines", "links", "metrics", "predict", "tasks.linearity", "tasks.ood", "tasks.selective"}
    modules |= {"tasks.sensitivity"}
    report = {f"tasks.fidelity_report.{name}" for name in ("Fidelity", "Part", "Table")} | {"tasks.fidelity.fidelity"}
    report |= {"tuning.leaderboard.Leaderboard", "tuning.rows.Row"}
    assert shown == (set(propagauss.__all__) - {"__version__", "tasks"}) | modules | report


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_pages_that_mkdocs_does_not_check_lead_to_files(name):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / name).read_text())
    assert not [target for target in targets if not (ROOT / target).exists()]


def test_files_that_pages_name_are_there():
    named = re.compile(
        r"(?<![\w/.-])(?:src|tests|docs|requirements|rules|posteriors|likelihoods)/[\w/.-]*\w\.(?:py|md)\b|tests/[\w/]+/(?=`)"
    )
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for name in named.findall(page.read_text()):
            homes = (ROOT, ROOT / "src" / "propagauss", page.parent)
            assert any((home / name).exists() for home in homes), f"{page.relative_to(ROOT)} names {name}"


@pytest.mark.parametrize(
    ("printed", "shown", "rough", "same"),
    [
        ("a 1.00\n", "a  1.00", False, True),
        ("a 1.01\n", "a 1.02", False, True),
        ("a 1.01\n", "b 1.01", True, False),
        ("a 1.01\n", "a 1.51", True, False),
        ("2,000 rows", "2,000 rows", False, True),
        ("wrong 2 times", "wrong 4 times", False, False),
        ("wrong 2 times", "wrong 4 times", True, True),
        ("wrong 2 times", "wrong 9 times", True, False),
    ],
)
def test_what_counts_as_the_same_output(printed, shown, rough, same):
    assert alike(printed, shown, rough) == same
