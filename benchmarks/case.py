"""What is compared: a case is one input, the plain model, and several ways to predict with uncertainty on that input.

A new benchmark is a file with a function `cases(batches) -> list[Case]`, and its line in `benchmarks.__main__.SUITES`.
Nothing is built before a case runs, so that listing and choosing cost nothing; what cases share, their file caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from propagauss import Gaussian

Predict = Callable[[Any], Any]
PLAIN = "plain forward"


class SkipMethod(Exception):
    """Why a method cannot be run here; printed in place of its numbers."""


@dataclass(frozen=True)
class Method:
    """One row of a case: something to time, or (`computed`) a number to stand beside the timings."""

    name: str
    make: Callable[[], Predict] | None = None
    computed: Callable[[], float] | None = None
    limit: float | None = None  # the largest ratio to the plain forward that we accept
    same: bool = False  # whether it computes the same numbers as the other methods so marked
    error: Callable[[Predict], float] | None = None  # of its standard deviations, as a fraction, on inputs of its own
    error_limit: float | None = None
    heavy: bool = False  # too slow, or too slow to build, for --quick
    needs_grad: bool = False  # runs with autograd enabled because it fails without
    note: str = ""


@dataclass(frozen=True)
class Faster:
    """One method of a case is to be this many times faster than another; without a limit, only to be compared."""

    method: str
    other: str
    at_least: float | None = None


@dataclass(frozen=True)
class Case:
    name: str  # such as mlp/diagonal/64
    title: str
    inputs: Callable[[], Any]
    plain: Callable[[], Predict]
    methods: list[Method] = field(default_factory=list)
    patience: float = 1.0  # slow models get this many times the usual time, for enough rounds
    faster: list[Faster] = field(default_factory=list)

    def chosen(self, pattern: str | None) -> list[Method]:
        """The methods whose `case/method` contains `pattern`, or matches it as a glob."""
        if pattern is None:
            return self.methods
        names = [f"{self.name}/{m.name}" for m in self.methods]
        return [
            m for m, name in zip(self.methods, names, strict=True) if pattern in name or fnmatch(name, f"{pattern}*")
        ]


def moments(output: Any) -> tuple[Tensor, Tensor]:
    """Mean and variances of what a method returned: a Gaussian, or a pair of mean and variance or covariance."""
    mean, around = (output.mean, output.variance) if isinstance(output, Gaussian) else output[:2]
    mean, around = torch.as_tensor(mean).detach(), torch.as_tensor(around).detach()
    return mean, around.diagonal(dim1=-2, dim2=-1) if around.dim() > mean.dim() else around
