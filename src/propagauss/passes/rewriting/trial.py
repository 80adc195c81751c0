"""Run a rewritten network once on the example, so that what was streamlined cannot fail later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from propagauss.gaussian import Gaussian
from propagauss.network.streamlined import Streamlined
from propagauss.tracing.trace import Traced

SAMPLES = 2  # are enough to try


class Failure(Exception):
    """A node of a network cannot run."""

    def __init__(self, node: fx.Node, error: Exception):
        super().__init__(str(error))
        self.node, self.error = node, error


class _Watched(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            raise Failure(n, error) from error


def try_out(net: Streamlined, traced: Traced) -> Failure | None:
    """The first node that fails on the example; None if there is none.

    Not on tensors without numbers: a failed derivative of such a one can leave PyTorch unable to trace anything.
    """
    leaves = _example(traced)
    with torch.no_grad():
        for tried in ([_few(leaf, traced) for leaf in leaves], leaves):  # a few samples need not make sense alone
            try:
                net.outputs(tried)
                return None
            except Exception:
                continue
        try:
            _Watched(net.body).run(*leaves)
        except Failure as failure:
            return failure
    return None


def _example(traced: Traced) -> list[Any]:
    found = []
    for node, value, uncertain in zip(traced.inputs, traced.example, traced.uncertain_inputs, strict=True):
        if node is not None:
            found.append(Gaussian.diagonal(value, value.abs()) if uncertain else value)
    return found


def _few(leaf: Any, traced: Traced) -> Any:
    if not traced.batch_is_dynamic or leaf.shape[:1] != (traced.batch,):
        return leaf
    if isinstance(leaf, Tensor):
        return leaf[:SAMPLES]
    return Gaussian.diagonal(leaf.mean[:SAMPLES], leaf.variance[:SAMPLES])
