"""Whether an op keeps the samples of a batch apart: the full structure can only follow those that do.

Shapes cannot tell (`softmax(0)`, `flip(0)` keep them), so the op is tried on numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from propagauss.graph import hint


def mixes_samples(node: fx.Node, random: list[fx.Node], batch: int) -> bool:
    """Whether changing the first sample of the uncertain arguments changes the result for any other sample."""
    generator = torch.Generator().manual_seed(0)
    values = {a: _example(a, generator) for a in node.all_input_nodes}
    changed = dict(values)
    for a in random:
        if isinstance(values[a], Tensor) and values[a].numel() % batch == 0:
            changed[a] = values[a].clone()
            changed[a].reshape(batch, -1)[0] += torch.rand((), generator=generator) + 0.5
    try:
        before, after = _run(node, values), _run(node, changed)
    except Exception:  # an op that cannot be tried on made-up numbers is left to its rule
        return False
    for one, other in zip(before, after, strict=True):
        if one.numel() % batch:
            return True
        if not torch.equal(one.reshape(batch, -1)[1:], other.reshape(batch, -1)[1:]):
            return True
    return False


def _example(node: fx.Node, generator: torch.Generator) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return [_numbers(v, generator) for v in value]
    return _numbers(value, generator)


def _numbers(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, (int, torch.SymInt)) else value
    shape = [hint(s) for s in value.shape]
    if value.is_floating_point():
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    if len(shape) == 1:
        return torch.arange(shape[0]).to(value.dtype)  # most likely the numbers of the samples
    return torch.zeros(shape, dtype=value.dtype)


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> list[Tensor]:
    op: Any = node.target
    args: Any = map_arg(node.args, lambda a: values[a])
    kwargs: Any = map_arg(node.kwargs, lambda a: values[a])
    result = op(*args, **kwargs)
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [p for p in parts if isinstance(p, Tensor) and p.is_floating_point()]
