"""A Laplace posterior adds up what each sample tells on its own: samples of a batch may not depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.inputs.samples import FEW, TOLERANCE, Batch, depend, disturbed, halves, patterns, precise, takes

SUSPECTS = 4  # samples to look at again one by one
_MIXED = (
    "the outputs of a sample depend on the rest of its batch, so it has no gradient of its own: a model that mixes "
    "samples has no Laplace posterior; if an input without a batch dimension is as long as the batch, use another "
    "batch size"
)
_CHANGING = (
    "the model returns something else at every call, as one that draws random numbers or changes its buffers does: "
    "there is no one output for a Laplace posterior to be about. Let forward leave them as they are"
)


def check_samples_apart(
    forward: Callable[..., Tensor], parameters: Mapping[str, Tensor], x: Any, shape: torch.Size, size: int
) -> None:
    """Raise if other samples change the outputs of this shape, `[B, ...]`, of the rest of them.

    `forward` takes inputs, and others in place of `parameters`, which are those of interest.
    """
    if size < 2 or shape[:1] != (size,):
        return
    leaves, spec = pytree.tree_flatten(x)
    whole = Batch.of(leaves, size)

    def run(values: list[Any], others: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """Of samples that are made up, or fewer than the model may take: None if it does not."""
        try:
            output = forward(pytree.tree_unflatten(values, spec), others)
        except Exception:
            return None
        return output if output.shape[1:] == shape[1:] else None

    def check(batch: Batch, sets: list[Tensor], others: Mapping[str, Tensor] | None = None) -> None:
        before = run(batch.values, others)
        if before is None or len(before) != batch.size:
            return
        for mask in sets:
            changed = run(batch.changed(mask), others)
            if changed is None or not takes(before, changed):
                changed = run(batch.changed(mask, gently=True), others)
            if changed is not None and changed.shape == before.shape and depend(before, changed, mask):
                again = run(batch.values, others)
                raise InputError(_MIXED if again is None or torch.allclose(again, before, rtol=1e-4) else _CHANGING)

    with torch.no_grad():
        others = _others(parameters)
        some = whole.few() if size > FEW else whole
        if run(some.values, others) is None:
            some, others = whole, None
        check(some, patterns(some.size), others)
        turned = some.turned()
        if turned is not None:
            check(turned, patterns(some.size), others)
        if some is not whole:
            check(whole, halves(size))
            check(whole, _suspects(run, whole))


def _others(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: disturbed(p, generator) for name, p in parameters.items()}


def _suspects(run: Callable[..., Tensor | None], batch: Batch) -> list[Tensor]:
    """Sets of one sample whose gradient of a weighted sum of all outputs has other weights than its own.

    That is a look at all pairs at once; gradients that are nothing but rounding look like that as well.
    """
    at = [i for i, (v, has) in enumerate(zip(batch.values, batch.have, strict=True)) if has and v.is_floating_point()]
    values = list(batch.values)
    for i in at:
        values[i] = values[i].detach().clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            output = run(values)
            if output is None or not output.requires_grad:
                return []
            rows = output.reshape(batch.size, -1)
            columns, weights = (torch.rand(n, generator=generator).to(rows) + 1 for n in rows.shape[::-1])
            leaves, total = [values[i] for i in at], rows @ columns
            plain = torch.autograd.grad(total.sum(), leaves, retain_graph=True, allow_unused=True)
            weighted = torch.autograd.grad(total @ weights, leaves, allow_unused=True)
    except RuntimeError:  # of a model without gradients by its inputs
        return []
    found = [_disproportion(a, b, weights) for a, b in zip(plain, weighted, strict=True) if a is not None]
    most = torch.stack(found).amax(0) if found else torch.zeros(batch.size)
    worst = most.topk(min(SUSPECTS, batch.size)).indices.tolist()
    return [torch.arange(batch.size) == i for i in worst if most[i] > TOLERANCE]


def _disproportion(plain: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    """Of every sample, relative to its gradient."""
    a, b = (precise(g).reshape(len(weights), -1) for g in (plain, weighted))
    difference = (b - precise(weights)[:, None] * a).abs().amax(1)
    return (difference / a.abs().amax(1).clamp(min=1e-30)).nan_to_num().cpu()


def check_independence(alone: Tensor, together: Tensor) -> None:
    """Raise unless samples on their own give the outputs `[b, C]` that they gave in the batch."""
    if not _agree(alone, together):
        raise InputError(_MIXED)


def _agree(alone: Tensor, together: Tensor) -> bool:
    tolerance = 1e4 * torch.finfo(together.dtype).eps * float(together.abs().amax())
    return alone.shape == together.shape and float((alone - together).abs().amax()) <= tolerance
