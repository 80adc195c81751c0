"""Run a rewritten network once on the example, without numbers, so that what was streamlined cannot fail later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from propagauss.gaussian import Gaussian
from propagauss.trace import Traced

_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Failure(Exception):
    """A node of a network cannot run."""

    def __init__(self, node: fx.Node, error: Exception):
        super().__init__(str(error))
        self.node, self.error = node, error


class _Watched(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except _UNKNOWN:
            raise
        except Exception as error:
            raise Failure(n, error) from error


def try_out(body: fx.GraphModule, traced: Traced) -> Failure | None:
    """The first node that fails on tensors like those of the example; None if there is none."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    leaves = []
    for node, value, uncertain in zip(traced.inputs, traced.example, traced.uncertain_inputs, strict=True):
        if node is not None:
            value = pytree.tree_map_only(Tensor, mode.from_tensor, value)
            leaves.append(Gaussian.diagonal(value, value.abs()) if uncertain else value)
    try:
        with mode, torch.no_grad():
            _Watched(body).run(*leaves)
    except Failure as failure:
        return failure
    except _UNKNOWN:  # an op that has no result without numbers: nothing is known
        return None
    return None
