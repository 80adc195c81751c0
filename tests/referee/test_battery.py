"""Every case of the battery is right, or refused as the page says.

A normal run judges most cases in one of the two modes, with one posterior; REFEREE_LONG=1 in both, with all of them.
Every case is also linearised.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Literal

import pytest
import torch

import propagauss as pg
from referee.case import Case, built
from referee.cases import BATTERY
from referee.judge import judge
from referee.table import MODES, kinds_on
from referee.truth import STRUCTURES, Mode, check_derivatives, first_order, random_posterior

pytestmark = pytest.mark.usefixtures("one_trace")

PAGE = Path(__file__).parents[2] / "docs" / "referee.md"
LONG = bool(os.environ.get("REFEREE_LONG"))
IN_BOTH_MODES = {"Attention", "Residual, dense and gated blocks", "Detach, aliases and ops in place"}


def _runs() -> list[tuple[Case, Mode | Literal["linearised"], str]]:
    """The runs of a case stand in a row: they share a trace."""
    return [(case, *run) for case in BATTERY for run in (*_streamlined(case), *_linearised(case))]


def _streamlined(case: Case) -> list[tuple[Mode, str]]:
    if LONG:
        return [(mode, structure) for mode in MODES for structure in STRUCTURES]
    return [
        (mode, case.turn if mode == "full" else "diagonal")
        for i, mode in enumerate(MODES)
        if case.section in IN_BOTH_MODES or _lot(case) % 2 == i
        if case.section != "Elementwise functions" or _lot(case) % 4 < 2
    ]


def _linearised(case: Case) -> list[tuple[Literal["linearised"], str]]:
    return [] if "data-dependent" in case.name else [("linearised", case.turn)]


def _lot(case: Case) -> int:
    """A number that depends on nothing but the name."""
    return zlib.crc32(case.name.encode()) // len(STRUCTURES)


@pytest.mark.parametrize(("case", "mode", "structure"), _runs(), ids=lambda v: str(v))
def test_case(case: Case, mode: Mode | Literal["linearised"], structure: str) -> None:
    if mode == "linearised":
        check_linearised(case)
        return
    verdict = judge(case, mode, structure)
    assert verdict.is_good, str(verdict)
    said = kinds_on(PAGE).get(case.name, ("nothing", "nothing"))[MODES.index(mode)]
    # the page has the worst over all posteriors
    allowed = {said, "exact"} if said != "refused" else {said}
    assert verdict.kind in allowed, f"{verdict}, but {PAGE.name} says {said}: make referee writes the page"


def check_linearised(case: Case) -> None:
    """Exact to first order, or refused where sizes depend on the data or PyTorch has no derivative."""
    model, inputs, names = built(case)
    shapes = {n: p.shape for n, p in model.named_parameters() if n in names}
    posterior, covariance = random_posterior(shapes, case.turn, case.generator())
    try:
        net = pg.linearise(model, posterior, inputs)
    except pg.UnsupportedOpError as error:
        known = ("depends on the values", "takes the batch apart", "could not be told", "no derivative")
        assert any(words in str(error) for words in known)
        return
    check_derivatives(model, inputs, names)
    with torch.no_grad():
        result = net(*inputs)
    gaussians = [g for g in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(g, pg.Gaussian)]
    for g, truth in zip(gaussians, first_order(model, inputs, names, covariance, "first order"), strict=True):
        batch, n = g.covariance.shape[:2]
        dense = truth.reshape(batch, n, batch, n) if truth.numel() == (batch * n) ** 2 else None
        own = truth if dense is None else torch.stack([dense[b, :, b] for b in range(batch)])
        torch.testing.assert_close(g.covariance, own, rtol=1e-6, atol=1e-9 * own.abs().max().clamp(min=1e-30).item())


def test_names_are_unique() -> None:
    names = [c.name for c in BATTERY]
    assert sorted(set(names)) == sorted(names)
