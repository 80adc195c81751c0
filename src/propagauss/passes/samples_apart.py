"""Do the samples of a batch depend on each other? Then the rows of a Jacobian could not be told apart.

This looks at a whole model, on its example; sample_mixing.py at one op.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.errors import UnsupportedOpError
from propagauss.inputs.samples import has_samples, others, with_another
from propagauss.nodes import depends, is_assertion, reached
from propagauss.tracing.trace import Traced

TOLERANCE = 1e-3  # of the largest change: products of matrices of other sizes are rounded otherwise


class _Plain(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None if is_assertion(target) else super().call_function(target, args, kwargs)


def check_samples_apart(traced: Traced) -> None:
    """Raise if another first or last sample changes what the model returns for the others, on the example."""
    values = _example(traced)
    found = _dependent_output(traced, values)
    if found is None:
        return
    i, old = found
    if not torch.equal(old, _run(traced, values)[i]):
        raise UnsupportedOpError(
            "cannot linearise this model: it draws random numbers, so that it returns something else at every "
            "call. Leave them out, or give them as an input."
        )
    raise UnsupportedOpError(
        "cannot linearise this model: what it returns for one sample of a batch depends on the others, or the "
        "batch is not the first dimension of its output. Let it treat samples one by one."
    )


def samples_may_meet(traced: Traced) -> bool:
    """Whether they do on the example; False if it cannot be run."""
    values = _example(traced)
    if traced.batch_is_dynamic:
        if any(_is_of_all(output, traced) for output in traced.outputs):
            return True
        # two are enough to tell
        values = [v[[0, -1]] if has_samples(v, traced.batch) else v for v in values]
        traced = replace(traced, batch=2)
    try:
        return _dependent_output(traced, values) is not None
    except Exception:  # inputs of the example that do not make sense together: calls will say so
        return False


def _is_of_all(output: Any, traced: Traced) -> bool:
    """Whether an output is made of the inputs, but has no dimension for samples."""
    value = output.meta.get("val") if isinstance(output, fx.Node) else None
    if not isinstance(value, Tensor) or any(depends(size, traced.batch_symbols) for size in value.shape):
        return False
    return output in reached(traced.graph, [n for n in traced.inputs if n is not None])


def _example(traced: Traced) -> list[Any]:
    return [v for node, v in zip(traced.inputs, traced.example, strict=True) if node is not None]


def _dependent_output(traced: Traced, values: list[Any]) -> tuple[int, Tensor] | None:
    """The first output in which others change with the first sample, or the last, if any, and what it was before."""
    if traced.batch < 2 or not any(has_samples(v, traced.batch) for v in values):
        return None
    before = _run(traced, values)
    for sample in (0, -1):
        after = _run(traced, [with_another(v, sample, traced.batch) for v in values])
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            plain = isinstance(old, Tensor) and old.is_floating_point() and old.layout == torch.strided
            if not plain or old.shape[:1] != (traced.batch,):
                continue
            change = (new - old).abs()
            noise = old.abs().amax() * torch.finfo(old.dtype).eps
            if others(change, sample).amax() > TOLERANCE * (change[sample].amax() + noise):
                return i, old
    return None


def _run(traced: Traced, inputs: list[Any]) -> Any:
    given = iter(inputs)
    known = {node: next(given) for node in traced.inputs if node is not None}
    arguments = []
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            arguments.append(traced.constants[node.name] if node.name in traced.constants else known.get(node))
    with torch.no_grad():
        return _Plain(torch.nn.Module(), graph=traced.graph).run(*arguments, enable_io_processing=False)
