"""Whether an op keeps the samples of a batch apart: the full structure can only follow those that do.

Shapes cannot tell (`softmax(0)`, `flip(0)` keep them), so the op is tried on numbers: change some samples,
and see whether any other changes with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from propagauss.inputs.samples import patterns
from propagauss.nodes import depends, hint
from propagauss.tracing.trace import Traced

RANGES = ((0.5, 1.0), (0.05, 0.9), (1.1, 0.9))  # start and width: some functions are defined on one of them only


def is_batched(node: fx.Node, traced: Traced) -> bool:
    """Whether a value has a row for each sample, rather than being the same for all."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (tuple, list)) else value
    shape = getattr(first, "shape", ())
    if traced.batch_is_dynamic:
        return any(depends(s, traced.batch_symbols) for s in shape)
    return len(shape) > 0 and hint(shape[0]) % traced.batch == 0 and traced.batch > 1


def samples_of(node: fx.Node, traced: Traced) -> tuple[int, int] | None:
    """How many dimensions of a value come before and with the one that counts samples, and its rows for each sample.

    None if other entries come before the samples, so that those of one sample are not together.
    """
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    for i, size in enumerate(first.shape):
        if depends(size, traced.batch_symbols) or (not traced.batch_is_dynamic and hint(size) % traced.batch == 0):
            return i + 1, max(hint(size) // traced.batch, 1)
        if hint(size) != 1:
            return None
    return None


def mixes_samples(
    node: fx.Node, is_batched: Callable[[fx.Node], bool], traced: Traced, inner: Container[fx.Node] = ()
) -> bool:
    """Whether other samples of the uncertain arguments, those of `is_batched`, change the result for the rest.

    What comes before it among `inner` is a part of the op, such as the whole result of which it takes one part.
    """
    steps = _with_inner(node, inner)
    inputs = list(dict.fromkeys(a for step in steps for a in step.all_input_nodes if a not in steps))
    changing = [a for a in inputs if is_batched(a)]

    def run(values: dict[fx.Node, Any]) -> Any:
        known = dict(values)
        for step in steps:
            op: Any = step.target
            args: Any = map_arg(step.args, known.__getitem__)
            kwargs: Any = map_arg(step.kwargs, known.__getitem__)
            known[step] = op(*args, **kwargs)
        return known[node]

    return bool(changing) and any(_mixes(run, inputs, changing, traced))


def _with_inner(node: fx.Node, inner: Container[fx.Node]) -> list[fx.Node]:
    """The node, after what leads to it within `inner`."""
    found: dict[fx.Node, None] = {}

    def visit(step: fx.Node) -> None:
        for a in step.all_input_nodes:
            if a in inner and a not in found:
                visit(a)
        found[step] = None

    visit(node)
    return list(found)


def keeps_apart(
    piece: Callable[..., Tensor], source: fx.Node, sources: list[fx.Node], extras: list[fx.Node], traced: Traced
) -> bool:
    """Whether a function of `(*sources, *extras)` keeps the samples of one of its arguments apart, for certain."""

    def run(values: dict[fx.Node, Any]) -> Any:
        return piece(*(values[n] for n in (*sources, *extras)))

    found = list(_mixes(run, [*sources, *extras], [source], traced))
    return bool(found) and not any(found)


def _mixes(
    run: Callable[[dict[fx.Node, Any]], Any], inputs: list[fx.Node], random: list[fx.Node], traced: Traced
) -> Iterator[bool]:
    """An answer for every trial that could be made."""
    generator = torch.Generator().manual_seed(0)
    sets = patterns(traced.batch) or [torch.ones(1, dtype=torch.bool)]
    pairs = zip(itertools.cycle(sets), itertools.cycle(RANGES))
    for flipped in (False, True):
        known = Values(traced, flipped)
        for mask, (start, width) in itertools.islice(pairs, max(len(sets), len(RANGES))):
            values = {a: _trial(a, known, generator, start, width) for a in inputs}
            changed = dict(values)
            for a in random:
                changed[a] = _changed(values[a], mask, generator)
            try:
                before, after = _floats(run(values)), _floats(run(changed))
            except Exception:  # not every op takes made-up numbers
                continue
            yield any(_differs(one, other, mask) for one, other in zip(before, after, strict=True))


def _differs(one: Tensor, other: Tensor, mask: Tensor) -> bool:
    """For any sample that is not in the set."""
    if one.numel() % len(mask) or other.numel() % len(mask):
        return True
    before, after = (result.reshape(len(mask), -1)[~mask] for result in (one, other))
    return not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True)


def _changed(value: Any, mask: Tensor, generator: torch.Generator) -> Any:
    """Other numbers for the samples in a set."""
    if isinstance(value, (tuple, list)):
        return [_changed(v, mask, generator) for v in value]
    if not isinstance(value, Tensor) or not _is_inexact(value) or value.numel() % len(mask) or not value.numel():
        return value
    rows = value.reshape(len(mask), -1)
    other = rows + 0.05 * (1 + torch.rand(rows.shape[1], generator=generator, dtype=rows.real.dtype))
    return torch.where(mask[:, None], other, rows).view(value.shape)


def _trial(node: fx.Node, known: Values, generator: torch.Generator, start: float, width: float) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return [_numbers(v, generator, start, width) for v in value]
    if isinstance(value, Tensor) and not _is_inexact(value):
        return known[node]
    return _numbers(value, generator, start, width)


def _numbers(value: Any, generator: torch.Generator, start: float, width: float) -> Any:
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, (int, torch.SymInt)) else value
    shape = [hint(s) for s in value.shape]
    numbers = start + width * torch.rand(shape, generator=generator, dtype=torch.float64)
    if value.is_complex():
        return torch.complex(numbers, numbers.flip(0) if shape else numbers)
    return numbers if value.is_floating_point() else numbers.to(value.dtype)


def _floats(result: Any) -> list[Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    kept = [p for p in parts if isinstance(p, Tensor)]
    return [torch.view_as_real(p) if p.is_complex() else p for p in kept if _is_inexact(p)]


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


class Values:
    """What the nodes of a traced graph are on its example, computed when asked for.

    With `flipped`, integers among the inputs come in reverse: indices that happen to be in order in the example, as the
    numbers of the samples are, then show that they need not be.
    """

    def __init__(self, traced: Traced, flipped: bool):
        self.known: dict[fx.Node, Any] = {}
        for node, value in zip(traced.inputs, traced.example, strict=True):
            if node is not None:
                whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dim() > 0
                self.known[node] = value.flip(tuple(range(value.dim()))) if flipped and whole else value
        self.constants = traced.constants

    def __getitem__(self, node: fx.Node) -> Any:
        waiting = [node]  # instead of recursion, which deep models would take too far
        while waiting:
            missing = [a for a in self._sources(waiting[-1]) if a not in self.known]
            if missing:
                waiting += missing
                continue
            first = waiting.pop()
            if first not in self.known:
                with torch.no_grad():
                    self.known[first] = self._compute(first)
        return self.known[node]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [] if node in self.known or _is_number(node) else node.all_input_nodes

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.constants[node.name]
        if _is_number(node):
            return hint(node.meta["val"])
        op: Any = node.target
        args: Any = map_arg(node.args, self.known.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self.known.__getitem__)
        return op(*args, **kwargs)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))
