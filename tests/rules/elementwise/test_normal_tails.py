"""Tails of the normal distribution, as closed moments need them."""

from __future__ import annotations

import torch

from propagauss.rules.elementwise.pieces import log_cdf, split
from rules.cases import Call


def test_logarithms_of_probabilities() -> None:
    """In the written out form of exported graphs, too."""
    a = torch.tensor([-1e4, -20.0, -2.0, -1e-6, 0.0, 1e-6, 0.3, 2.0, 20.0, 70.0, 1e4, 1e8], dtype=torch.float64)
    expected = torch.special.log_ndtr(a)
    torch.testing.assert_close(log_cdf(a), expected, rtol=0, atol=0)
    exported = torch.export.export(Call(log_cdf), (a,), strict=False).module()(a)  # type: ignore[arg-type]
    torch.testing.assert_close(exported, expected, rtol=1e-10, atol=1e-14)


def test_normal_tails_written_out() -> None:
    """Exported graphs have no error function in double precision; what they have instead is as good."""
    a = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    below, above = split(a)
    torch.testing.assert_close(below, torch.special.log_ndtr(a).exp(), rtol=1e-12, atol=0)
    exported = torch.export.export(Call(split), (a,), strict=False).module()(a)  # type: ignore[arg-type]
    torch.testing.assert_close(exported, (below, above), rtol=1e-10, atol=0)
    assert not torch.equal(exported[0], below)
