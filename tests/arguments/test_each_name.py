"""Wrong arguments of everything public: one error of ours that says what it is, where, and what to do."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import propagauss as pg
from arguments import measures, networks, posteriors
from arguments.given import Row
from propagauss import baselines, links, metrics, tasks

ROWS: list[Row] = [*networks.ROWS, *posteriors.ROWS, *measures.ROWS]


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(("name", "what", "call", "match"), ROWS, ids=[f"{n}: {w}" for n, w, *_ in ROWS])
def test_what_is_particular(name: str, what: str, call: Callable[[Any], Any], match: str, t: SimpleNamespace) -> None:
    with pytest.raises(pg.PropagaussError, match=match) as caught:
        call(t)
    assert "\n" not in str(caught.value), "one sentence is enough"


def test_every_public_name_is_tried() -> None:
    tried = {name for name, *_ in ROWS} | {name.split(".")[0] for name, *_ in ROWS}
    errors = {n for n in pg.__all__ if n.endswith("Error")} | {"__version__"}
    assert set(pg.__all__) - errors <= tried
    for module in (metrics, links, baselines, tasks):
        name = module.__name__.removeprefix("propagauss.")
        public = {n for n in module.__all__ if n not in ("LINKS", "Link", "RiskCoverage")}
        assert {f"{name}.{n}" for n in public} <= tried
