"""The built site in a browser without a network: `make look` builds it and runs this.

Elsewhere these tests are skipped: PROPAGAUSS_SITE names the folder that `mkdocs build` wrote.
"""

import contextlib
import math
import os
from pathlib import Path

import pytest

from website.browser import CHROMIUM, Browser, served

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("PROPAGAUSS_SITE", ROOT / "nowhere"))
CLIPPED = (Path(__file__).parent / "clipped.js").read_text()
WIDTHS = (1280, 390)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="needs the built site: run make look"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: chromium is not on the PATH"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def address():
    with served(SITE) as found:
        yield found


def package(name):
    """Skips a test if the site was built without a package from npm."""
    if not (SITE / "packages" / name).is_dir():
        pytest.skip(f"the site was built without {name}: npm was missing, or the network")


def absent(problem):
    """Whether it is about a package that the site was built without."""
    name = problem.partition("/packages/")[2].partition("/")[0]
    return bool(name) and not (SITE / "packages" / name).is_dir()


def clipped(browser, where):
    """What is cut off on the page that is open, at every width."""
    found = []
    for width in WIDTHS:
        browser.resize(width)
        found += [f"{where or 'index'} at {width} px: {what} ({by} px)" for what, by in browser.run(CLIPPED)]
    return found


def test_pages_are_whole_and_need_no_other_server(browser, address):
    found = []
    pages = sorted(page.relative_to(SITE).parent.as_posix() for page in SITE.rglob("index.html"))
    assert len(pages) > 30
    with contextlib.ExitStack() as stack:
        for page in pages:
            where = "" if page == "." else f"{page}/"
            browser.open(address + where)
            found += clipped(browser, where) + [f"{where}: {p}" for p in browser.problems() if not absent(p)]
            if page == pages[0]:  # which has read what can be searched: for each page, a quarter of the time
                stack.enter_context(browser.without_workers())
    assert not found, "\n".join(found)


def test_what_is_cut_off_is_found(browser, tmp_path):
    """The check itself: a table that is cut, one that scrolls, one that makes the page wider."""
    table = f"<table><tr><td>{'wide' * 400}</td></tr></table>"
    cases = {"overflow: hidden": True, "overflow: auto": False, "": True}
    for style, cut in cases.items():
        (tmp_path / "index.html").write_text(f'<main><div style="{style}">{table}</div></main>')
        with served(tmp_path) as address:
            browser.open(address)
            assert bool(browser.run(CLIPPED)) == cut, style


def test_formulas_are_typeset(browser, address):
    package("katex")
    for page in sorted((SITE / "maths").iterdir()):
        browser.open(f"{address}maths/{page.name}/")
        counts = [browser.run(f"document.querySelectorAll('{s}').length") for s in (".arithmatex", ".katex-error")]
        left = "[...document.querySelectorAll('.arithmatex')].filter((e) => !e.querySelector('.katex')).length"
        assert counts[0] > 0 and counts[1] == 0 and browser.run(left) == 0, page.name
        assert browser.run("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Main'))")


def test_the_report_is_whole(browser):
    with served(ROOT / "results") as address:
        browser.open(f"{address}report.html")
        assert not clipped(browser, "report.html")
        assert not browser.problems()


# -- the page to play with

SEVEN = [[(75, 60), (205, 60), (190, 100), (125, 235)]]
ZERO = [[(140 + 60 * math.sin(t / 4), 140 - 95 * math.cos(t / 4)) for t in range(26)]]
SCRIBBLE = [[(40, 60), (230, 90), (60, 130), (240, 190), (50, 220), (210, 40), (90, 240), (130, 30), (220, 230)]]
STAR = [[(140, 30), (200, 240), (30, 110), (250, 110), (80, 240), (140, 30)]]


@pytest.fixture(params=WIDTHS)
def play(request, browser, address):
    package("onnxruntime-web")
    browser.open(f"{address}play/", request.param)
    browser.wait("!document.querySelector('#play .play-status')")
    yield browser
    assert not browser.problems()


def seen(browser, act):
    """What the page says after `act`."""
    data = "document.getElementById('play').dataset"
    browser.run(f"delete {data}.digit")
    act()
    found = browser.wait(f"{data}.digit && {{...{data}}}")
    return {key: float(found[key]) for key in ("digit", "plain", "bayesian", "uncertainty", "below")}


def drawn(browser, strokes):
    """The same after drawing on clean paper, with the mouse, or with a finger on a narrow screen."""
    browser.run("document.querySelector('.play-clear').click()")
    place = "document.querySelector('.play-paper').getBoundingClientRect()"
    left, top, side = browser.run(f"(({{left, top, width}}) => [left, top, width])({place})")
    scaled = [[(left + x * side / 280, top + y * side / 280) for x, y in stroke] for stroke in strokes]
    touch = browser.run("innerWidth < 600")
    return seen(browser, lambda: [browser.draw(stroke, touch) for stroke in scaled])


def test_a_drawn_digit_is_known_and_a_scribble_is_not(play):
    seven, zero = drawn(play, SEVEN), drawn(play, ZERO)
    for digit, found in ((7, seven), (0, zero)):
        assert found["digit"] == digit and found["bayesian"] > 0.95 and found["below"] < 0.9
    for strokes in (SCRIBBLE, STAR):
        found = drawn(play, strokes)
        assert found["below"] > 0.97 and found["bayesian"] < found["plain"]
        assert found["uncertainty"] > 1.5 * max(seven["uncertainty"], zero["uncertainty"])


def test_shoes_and_noise_are_not_known(play):
    shoe = seen(play, lambda: play.run("document.querySelector('[title=trainer]').click()"))
    noise = seen(play, lambda: play.run("document.querySelector('.play-noise').click()"))
    for found in (shoe, noise):
        assert found["below"] > 0.97 and found["bayesian"] < found["plain"]
    assert shoe["bayesian"] < 0.8
    known = seen(play, lambda: play.run("document.querySelector('[title=\"a 7\"]').click()"))
    assert known["digit"] == 7 and known["below"] < 0.9
