"""A model as a function of its parameters, and the gradients of single samples.

    r_nc = J_nᵀ s_nc

`J_n [C, P]` is the Jacobian of the outputs for sample `n`, `s_nc [C]` a column of a root of the Hessian of its loss.
Work goes one column at a time and over chunks of samples, so `[batch, outputs, parameters]` is never stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from propagauss.alone import ALONE, quiet
from propagauss.errors import InputError
from propagauss.inputs import as_call, explained
from propagauss.posteriors.laplace.capture import Capture, Layer, Use
from propagauss.posteriors.laplace.independence import check_independence
from propagauss.posteriors.laplace.spots import Spot

BUDGET = 2**28  # bytes for the per-sample gradients, and for the image patches, that are alive at one time


class Forward:
    """A model as a function of its parameters, which are never written to.

    Detached copies (sharing memory) stand in for the parameters, so that no graph is built before the first chosen one.
    """

    def __init__(self, model: nn.Module, chosen: tuple[str, ...], joined: Callable[[Any], Any] = lambda output: output):
        self.model, self.chosen, self.joined = model, chosen, joined
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        self.vectorised = True  # until torch.vmap turns out not to cope with the model

    def __call__(self, x: Any, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        args, kwargs = as_call(x)
        parameters = {**self.parameters, **(replaced or {})}
        with ALONE:  # the parameters of the module are exchanged meanwhile
            return _tensor(self.joined(torch.func.functional_call(self.model, parameters, args, kwargs)))

    def capture(self, x: Any, where: str = "", size: int = 0) -> tuple[Tensor, Capture]:
        """The output, and what was seen on the way; with the `size` of the batch, also of what all samples share."""
        names = {id(self.parameters[n]): n for n in self.chosen}
        if size > 1:
            try:
                with Capture(names, size) as seen:
                    return self(x), seen
            except Exception:  # of a model that cannot have what samples share once for each of them, or not at all
                pass
        with Capture(names) as seen, explained(self.model, x, where):
            return self(x), seen

    def size(self, name: str) -> int:
        return self.parameters[name].numel()


def _tensor(output: Any) -> Tensor:
    output = output.get("logits", output) if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise InputError(
            f"the model returns a {type(output).__name__}; a Laplace fit needs a tensor, or something with .logits: "
            "wrap the model in a module that returns the tensor wanted"
        )
    if not output.is_floating_point():
        raise InputError(f"the model returns {output.dtype}; a Laplace fit needs real logits or means")
    return output


@dataclass
class Batch:
    """A batch after its forward pass.

    Attributes:
        x: tensor, tuple or dict.
        size: number of samples `B`.
        output: `[B, C]`, with its graph.
        column: `c -> [B, C]`, column `c` of the root of the loss Hessian of every sample.
        count: how many columns there are; None for one for each output.
    """

    forward: Forward
    x: Any
    size: int
    output: Tensor
    seen: Capture
    column: Callable[[int], Tensor]
    count: int | None = None

    def pull(self, uses: Sequence[Use | Spot]) -> Iterator[list[Tensor]]:
        """For each column, the gradients at the outputs of `uses`: `[rows, G, out / G]`; of a spot as they are."""
        for c in self.columns if uses and self.output.requires_grad else ():
            probes = [u.probe for u in uses]
            grads = torch.autograd.grad(self.output, probes, self.column(c), retain_graph=True, allow_unused=True)
            found = [torch.zeros_like(u.probe) if g is None else g for u, g in zip(uses, grads, strict=True)]
            yield [u.layer.gradients(g) if isinstance(u, Use) else g for u, g in zip(uses, found, strict=True)]

    @cached_property
    def columns(self) -> list[int]:
        """The columns that are not zero for all samples, as those of labels that are skipped."""
        return [c for c in range(self.count or self.output.shape[1]) if self.column(c).any()]

    @cached_property
    def direct(self) -> dict[str, list[Use | Spot]]:
        """Parameters whose per-sample gradients follow from their uses, as the rows of one sample lie together."""
        table: dict[str, list[Use | Spot]] = {}
        spoilt = set(self.seen.unread)
        for i, use in enumerate(self.seen.uses):
            good = self._lies_by_sample(use.layer.input, lambda half, i=i: half.uses[i].layer.input)
            for name in (use.weight, use.bias):
                if name is not None:
                    table.setdefault(name, []).append(use)
                    spoilt |= set() if good else {name}
        for i, spot in enumerate(self.seen.spots):
            table.setdefault(spot.name, []).append(spot)
            good = spot.shared or self._lies_by_sample(spot.output, lambda half, i=i: half.spots[i].output)
            spoilt |= set() if good and len(spot.probe) == self.size else {spot.name}
        return {name: uses for name, uses in table.items() if name not in spoilt}

    @cached_property
    def _half(self) -> Capture | None:
        """What is seen when only the first half of the samples is there; None if that is something else."""
        try:
            with torch.no_grad():
                seen = self.forward.capture(self.part(slice(0, self.size // 2)))[1]
        except (RuntimeError, ValueError):
            return None
        same = len(seen.uses) == len(self.seen.uses) and len(seen.spots) == len(self.seen.spots)
        return seen if same else None

    def _lies_by_sample(self, value: Tensor, of_half: Callable[[Capture], Tensor]) -> bool:
        """Shapes cannot tell [batch, time] from [time, batch] or from something all samples share; values can."""
        if self.size == 1:
            return True
        if value.shape[0] % self.size or self._half is None:
            return False
        half = self.size // 2
        rows = value.reshape(self.size, -1)[:half]
        again = of_half(self._half)
        if again.numel() != rows.numel():
            return False
        tolerance = 1e3 * torch.finfo(rows.dtype).eps * float(rows.abs().amax()) if rows.numel() else 0.0
        return bool(((rows - again.reshape(half, -1)).abs() <= tolerance).all())

    def part(self, which: slice) -> Any:
        """The input of some samples."""
        return pytree.tree_map(lambda t: t[which] if self.carries(t) else t, self.x)

    def carries(self, leaf: Any) -> bool:
        """Whether a leaf of the input has one entry per sample."""
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.size

    def chunks(self, names: list[str]) -> Iterator[slice]:
        """Runs of samples whose gradients fit the budget."""
        width = sum(self.forward.size(n) for n in names) * self.output.element_size()
        step = max(1, BUDGET // max(width, 1))
        return (slice(i, min(i + step, self.size)) for i in range(0, self.size, step))


# -- per-sample gradients


def per_sample_gradients(batch: Batch, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """`r_nc` for every column and some samples at a time: `{name: [b, *shape]}`."""
    direct = [n for n in names if n in batch.direct]
    rest = [n for n in names if n not in batch.direct]
    uses: list[Use | Spot] = [u for u in batch.seen.uses if u.weight in direct or u.bias in direct]
    uses += [s for s in batch.seen.spots if s.name in direct]
    pulled, inputs = batch.pull(uses), Inputs(batch)
    for c in batch.columns:
        gradients = next(pulled, [])
        for chunk in batch.chunks(names):
            found = {n: _from_uses(batch, n, uses, gradients, chunk, inputs) for n in direct}
            yield found | (_one_by_one(batch, rest, c, chunk) if rest else {})


class Inputs:
    """What the weights of layers are multiplied with, the same for every column: kept as far as the budget goes."""

    def __init__(self, batch: Batch):
        self._batch, self._room = batch, BUDGET
        self._kept: dict[tuple[int, int], Tensor] = {}

    def of(self, use: Use, chunk: slice) -> Tensor:
        """`[b * positions, G, in / G]`, for some samples."""
        key = (id(use), chunk.start)
        if key in self._kept:
            return self._kept[key]
        found = use.layer.inputs(use.layer.input.unflatten(0, (self._batch.size, -1))[chunk].flatten(0, 1))
        size = found.numel() * found.element_size()
        if size <= self._room:
            self._kept[key] = found
            self._room -= size
        return found


def _from_uses(
    batch: Batch, name: str, uses: Sequence[Use | Spot], gradients: list[Tensor], chunk: slice, inputs: Inputs
) -> Tensor:
    """`Σ_t g_t a_tᵀ` for a weight, `Σ_t g_t` for a bias, summed over the uses: `[b, *shape]`."""
    parameter = batch.forward.parameters[name]
    total = parameter.new_zeros((chunk.stop - chunk.start, *parameter.shape))
    for use, g in zip(uses, gradients, strict=bool(gradients)):
        if isinstance(use, Spot):
            total += use.gradient(g[chunk], chunk) if use.name == name else 0
            continue
        g = g.unflatten(0, (batch.size, -1))[chunk]  # [b, positions, G, out / G]
        if use.weight == name:
            product = torch.einsum("btgo,btgi->bgoi", g, inputs.of(use, chunk).unflatten(0, g.shape[:2]))
            total += as_stored(product, use.layer).reshape(total.shape)
        if use.bias == name:
            total += g.sum(1).reshape(total.shape)
    return total


def as_stored(product: Tensor, layer: Layer) -> Tensor:
    """`[..., out, in]` in the layout of the layer's weight."""
    return product if layer.stored == "[out, in]" else product.transpose(-2, -1)


def _one_by_one(batch: Batch, names: list[str], c: int, chunk: slice) -> dict[str, Tensor]:
    """Gradients of parameters that are used in any way at all, by treating every sample as a batch of its own."""
    column, found = batch.column(c)[chunk], None
    if batch.forward.vectorised:
        try:
            found = _vectorised(batch, names, column, chunk)
        except (RuntimeError, ValueError, AssertionError) as error:
            batch.forward.vectorised = False
            reason = str(error).strip().split("\n")[0]
            warnings.warn(
                f"torch.vmap cannot run this model ({reason}): the gradients of {', '.join(names)} are computed one "
                "sample at a time, which is slow; choose fewer parameters= if it takes too long",
                stacklevel=2,
            )
    if found is None:
        rows = [_single(batch, names, column[i], chunk.start + i) for i in range(len(column))]
        found = torch.stack([f for f, _ in rows]), {n: torch.stack([g[n] for _, g in rows]) for n in names}
    check_independence(found[0], batch.output.detach()[chunk])
    return found[1]


def _vectorised(batch: Batch, names: list[str], column: Tensor, chunk: slice) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs `[b, C]` and gradients, by torch.vmap."""
    leaves, spec = pytree.tree_flatten(batch.x)
    carries = [batch.carries(leaf) for leaf in leaves]
    chosen = {n: batch.forward.parameters[n] for n in names}

    def single(s: Tensor, *parts: Any) -> tuple[Tensor, dict[str, Tensor]]:
        lone = [p.unsqueeze(0) if one else p for p, one in zip(parts, carries, strict=True)]
        x = pytree.tree_unflatten(lone, spec)
        output, pullback, *_ = torch.func.vjp(lambda p: batch.forward(x, p).reshape(-1), chosen)
        return output, pullback(s)[0]

    parts = [leaf[chunk] if one else leaf for leaf, one in zip(leaves, carries, strict=True)]
    in_dims = (0, *(0 if one else None for one in carries))
    with quiet("There is a performance drop"):  # one per op that torch loops over
        return torch.func.vmap(single, in_dims=in_dims)(column, *parts)


def _single(batch: Batch, names: list[str], column: Tensor, index: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs `[C]` and gradients of one sample."""
    chosen = {n: batch.forward.parameters[n].clone().requires_grad_() for n in names}
    x = batch.part(slice(index, index + 1))
    with explained(batch.forward.model, x):
        output = batch.forward(x, chosen).reshape(-1)
    grads: Any = [None] * len(names)
    if output.requires_grad:
        grads = torch.autograd.grad(output, list(chosen.values()), column, allow_unused=True)
    pairs = zip(chosen.items(), grads, strict=True)
    return output.detach(), {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}
