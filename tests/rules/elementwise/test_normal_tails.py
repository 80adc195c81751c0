"""Tails of the normal distribution, as closed moments need them."""

from __future__ import annotations

import math

import torch

from propagauss.rules.elementwise.pieces import mills, split
from rules.cases import Call


def test_mills_ratio() -> None:
    """In the written out form of exported graphs, too."""
    u = torch.tensor([0.0, 1e-6, 0.3, 2.0, 20.0, 34.9, 35.1, 70.0, 1e4, 1e8], dtype=torch.float64)
    expected = math.sqrt(math.pi / 2) * torch.special.erfcx(u / math.sqrt(2))
    torch.testing.assert_close(mills(u), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(mills(u[:6]), expected[:6], rtol=1e-12, atol=0)
    exported = torch.export.export(Call(mills), (u,), strict=False).module()(u)  # type: ignore[arg-type]
    torch.testing.assert_close(exported, expected, rtol=1e-9, atol=0)


def test_normal_tails_written_out() -> None:
    """Exported graphs have no error function in double precision; what they have instead is as good."""
    a = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    below, above = split(a)
    torch.testing.assert_close(below, torch.special.log_ndtr(a).exp(), rtol=1e-12, atol=0)
    exported = torch.export.export(Call(split), (a,), strict=False).module()(a)  # type: ignore[arg-type]
    torch.testing.assert_close(exported, (below, above), rtol=1e-10, atol=0)
    assert not torch.equal(exported[0], below)
