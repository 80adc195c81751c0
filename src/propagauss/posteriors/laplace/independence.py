"""A Laplace posterior adds up what each sample tells on its own: samples of a batch may not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.inputs.samples import FEW, Batch, halves, patterns


def check_samples_apart(forward: Callable[[Any], Tensor], x: Any, output: Tensor, size: int) -> None:
    """Raise if other samples change the outputs `[B, ...]` of the rest of them."""
    if size < 2 or output.shape[:1] != (size,):
        return
    leaves, spec = pytree.tree_flatten(x)

    def run(values: list[Any]) -> Tensor | None:
        """Of samples that are made up, or fewer than the model may take: None if it does not."""
        try:
            with torch.no_grad():
                return forward(pytree.tree_unflatten(values, spec))
        except Exception:
            return None

    def check(batch: Batch, before: Tensor, sets: list[Tensor]) -> None:
        for mask in sets:
            changed = run(batch.changed(mask))
            if changed is None or changed.shape != before.shape or not changed.isfinite().all():
                continue
            rest = ~mask.to(changed.device)
            alone, together = (f[rest].reshape(int(rest.sum()), -1) for f in (changed, before))
            if not _agree(alone, together):
                again = run(batch.values)
                check_independence(alone, together, None if again is None else _agree(again, before))

    whole = Batch.of(leaves, size)
    some = run(whole.few().values) if size > FEW else None
    if some is None or some.shape != (FEW, *output.shape[1:]):
        check(whole, output.detach(), patterns(size))
    else:
        check(whole.few(), some, patterns(FEW))
        check(whole, output.detach(), halves(size))


def check_independence(alone: Tensor, together: Tensor, is_function: bool | None = None) -> None:
    """Raise unless samples on their own, or among others, give the outputs `[b, C]` that they gave in the batch.

    `is_function` tells whether the same batch gives the same outputs again, if that is known.
    """
    if _agree(alone, together):
        return
    if is_function is False:
        raise InputError(
            "the model returns something else at every call, as one that draws random numbers or changes its buffers "
            "does: there is no one output for a Laplace posterior to be about. Let forward leave them as they are"
        )
    raise InputError(
        "the outputs of a sample depend on the rest of its batch, so it has no gradient of its own: a model that "
        "mixes samples has no Laplace posterior; if an input without a batch dimension is as long as the batch, "
        "use another batch size"
    )


def _agree(alone: Tensor, together: Tensor) -> bool:
    tolerance = 1e4 * torch.finfo(together.dtype).eps * float(together.abs().amax())
    return alone.shape == together.shape and float((alone - together).abs().amax()) <= tolerance
