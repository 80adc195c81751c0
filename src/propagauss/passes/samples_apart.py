"""Do the samples of a batch depend on each other? Then the rows of a Jacobian could not be told apart.

This looks at a whole model, on its example; sample_mixing.py at one op.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.errors import UnsupportedOpError
from propagauss.inputs.samples import FEW, Batch, depend, disturbed, halves, patterns, takes
from propagauss.nodes import depends, is_assertion, reached
from propagauss.tracing.trace import Traced


class _Plain(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None if is_assertion(target) else super().call_function(target, args, kwargs)


def check_samples_apart(traced: Traced) -> None:
    """Raise if other samples change what the model returns for the rest of them, on the example."""
    whole = [] if some(traced).size == traced.batch else [(_whole(traced), halves(traced.batch))]
    for batch, sets in (*_looks(traced), *whole):
        found = _dependent_output(traced, batch, sets)
        if found is None:
            continue
        i, old = found
        if not torch.equal(old, _run(traced, batch.values)[i]):
            raise UnsupportedOpError(
                "cannot linearise this model: it draws random numbers, so that it returns something else at every "
                "call. Leave them out, or give them as an input."
            )
        raise UnsupportedOpError(
            "cannot linearise this model: what it returns for one sample of a batch depends on the others, or the "
            "batch is not the first dimension of its output. Let it treat samples one by one; if an input without a "
            "batch dimension is as long as the batch, give an example of another batch size."
        )


def samples_may_meet(traced: Traced, random: Collection[str]) -> bool:
    """Whether they do on some samples of the example; False if it cannot be run. `random` are names of parameters."""
    if traced.batch_is_dynamic and any(_is_of_all(output, traced) for output in traced.outputs):
        return True
    try:
        other = with_other_parameters(traced, random)
        model = other if _run_if_possible(other, some(traced).values) else traced
        return any(_dependent_output(model, *look) is not None for look in _looks(model))
    except Exception:  # inputs of the example that do not make sense together: calls will say so
        return False


def _looks(traced: Traced) -> Iterator[tuple[Batch, list[Tensor]]]:
    """Batches, and the sets of their samples to change."""
    batch = some(traced)
    yield batch, patterns(batch.size)
    turned = batch.turned()
    if turned is not None and _run_if_possible(traced, turned.values):
        yield turned, patterns(batch.size)


def with_other_parameters(traced: Traced, names: Collection[str] | None = None) -> Traced:
    """Those of these names; all of them if none are given."""
    generator = torch.Generator().manual_seed(0)
    others = {k for k, name in traced.parameters.items() if names is None or name in names}
    given = traced.constants.items()
    return replace(traced, constants={k: disturbed(v, generator) if k in others else v for k, v in given})


def _is_of_all(output: Any, traced: Traced) -> bool:
    """Whether an output is made of the inputs, but has no dimension for samples."""
    value = output.meta.get("val") if isinstance(output, fx.Node) else None
    if not isinstance(value, Tensor) or any(depends(size, traced.batch_symbols) for size in value.shape):
        return False
    return output in reached(traced.graph, [n for n in traced.inputs if n is not None])


def some(traced: Traced) -> Batch:
    """The inputs of the example; few samples of them, if the model can be run on these."""
    batch = _whole(traced)
    if not traced.batch_is_dynamic or traced.batch <= FEW:
        return batch
    try:
        _run(traced, batch.few().values)
    except Exception:  # it may pick a sample by its number
        return batch
    return batch.few()


def _whole(traced: Traced) -> Batch:
    given = zip(traced.inputs, traced.example, strict=True)
    return Batch.of([v for node, v in given if node is not None], traced.batch)


def _dependent_output(traced: Traced, batch: Batch, sets: list[Tensor]) -> tuple[int, Tensor] | None:
    """The first output in which samples change with others, if any, and what it was before."""
    if batch.size < 2 or not any(batch.have):
        return None
    nodes: Any = next(n for n in traced.graph.nodes if n.op == "output").args[0]
    before = _run(traced, batch.values)
    for mask in sets:
        after = _run_if_possible(traced, batch.changed(mask))
        if after is None or not all(map(_takes, before, after)):
            after = _run_if_possible(traced, batch.changed(mask, gently=True)) or before
        for i, (node, old, new) in enumerate(zip(nodes, before, after, strict=True)):
            plain = isinstance(old, Tensor) and old.is_floating_point() and old.layout == torch.strided
            if not plain or old.shape[:1] != (batch.size,) or not old.numel() or not _has_batch_first(node, traced):
                continue
            if depend(old, new, mask):
                return i, old
    return None


def _takes(before: Any, after: Any) -> bool:
    plain = isinstance(before, Tensor) and before.is_floating_point() and before.layout == torch.strided
    return not plain or takes(before, after)


def _run_if_possible(traced: Traced, inputs: list[Any]) -> Any:
    """Not every model takes inputs that are made up."""
    try:
        return _run(traced, inputs)
    except Exception:
        return None


def _has_batch_first(output: fx.Node, traced: Traced) -> bool:
    """Whether the first dimension of an output can be the batch: another one may be as large."""
    return not traced.batch_is_dynamic or depends(output.meta["val"].shape[0], traced.batch_symbols)


def _run(traced: Traced, inputs: list[Any]) -> Any:
    given = iter(inputs)
    known = {node: next(given) for node in traced.inputs if node is not None}
    arguments = []
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            arguments.append(traced.constants[node.name] if node.name in traced.constants else known.get(node))
    with torch.no_grad():
        return _Plain(torch.nn.Module(), graph=traced.graph).run(*arguments, enable_io_processing=False)
