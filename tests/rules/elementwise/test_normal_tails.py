"""Tails of the normal distribution, as closed moments need them."""

from __future__ import annotations

import torch

from propagauss.rules.elementwise.pieces import split
from rules.cases import Call


def test_normal_tails_written_out() -> None:
    """Exported graphs have no error function in double precision; what they have instead is as good."""
    a = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    below, above = split(a)
    torch.testing.assert_close(below, torch.special.log_ndtr(a).exp(), rtol=1e-12, atol=0)
    exported = torch.export.export(Call(split), (a,), strict=False).module()(a)  # type: ignore[arg-type]
    torch.testing.assert_close(exported, (below, above), rtol=1e-10, atol=0)
    assert not torch.equal(exported[0], below)
