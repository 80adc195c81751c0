"""`variance_tolerance`: low-rank factors for the variances of layers, with ranks found on the example.

A pass over a streamlined network. It runs the network once on the example, keeps what enters each layer, and gives the
layer the least rank whose standard deviations are right to twice the tolerance there and on uneven variations of it.
The whole network is then held to the tolerance itself on the example; if it fails, layers have to be closer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from propagauss.gaussian import Gaussian, mean_of
from propagauss.network.plan import Step
from propagauss.network.streamlined import Streamlined
from propagauss.nodes import STEP
from propagauss.rules.matrices.low_rank import FORMS, LowRankForm, factorise

RANKS = (1, 2, 4, 8, 16, 32)
WORTH = 4  # factors must have this many times fewer entries than what they stand for
TRIES = 5  # first with twice the tolerance for single layers, as errors average out; then with half of that, ...
ROWS, SAMPLES = 256, 8  # that a linear layer, a convolution is tried on


def compress(net: Streamlined, leaves: list[Any], tolerance: float) -> Streamlined:
    """Replace layers of a network, in place, by forms with low-rank factors where these pass."""
    with torch.no_grad():
        recorder = _Recorder(net.body)
        exact = recorder.run(*leaves)
        chosen: dict[fx.Node, Factors] = {}
        for attempt in range(TRIES):
            layers = tqdm(recorder.layers, desc="low-rank variances", disable=None, leave=False)
            within = 2 * tolerance / 2**attempt
            chosen = {layer.node: found for layer in layers if (found := layer.choose(within)) is not None}
            off = deviation(exact, _Replacing(net.body, chosen).run(*leaves))
            if off <= tolerance:
                break
        else:
            chosen, off = {}, 0.0
    _install(net.body, chosen)
    ranks = [factors.rank for factors in chosen.values()]
    note = f"variance_tolerance {tolerance:g}: low rank in {len(ranks)} of {len(recorder.layers)} layers"
    if ranks:
        note += f" ({min(ranks)} to {max(ranks)}); standard deviations of the output are {off:.2%} off on the example"
    steps = tuple(_described(step, chosen) for step in net.plan.steps)
    net.plan = replace(net.plan, steps=steps, notes=(*net.plan.notes, note))
    return net


def deviation(exact: Any, other: Any) -> float:
    """How far standard deviations are from the exact ones: relative, averaged over all entries that have any."""
    total, count = 0.0, 0
    pairs = zip(_gaussians(exact), _gaussians(other), strict=True)
    for a, b in pairs:
        some = a.variance > 0
        ratio = (b.variance[some] / a.variance[some]).sqrt()
        total, count = total + (ratio.double() - 1).abs().sum().item(), count + ratio.numel()
    return total / max(count, 1)


def _gaussians(tree: Any) -> list[Gaussian]:
    leaves = pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Gaussian))
    return [leaf for leaf in leaves if isinstance(leaf, Gaussian)]


# -- one layer


@dataclass(frozen=True)
class Factors:
    """What takes the place of the variances of a layer's weights."""

    left: Tensor
    right_mean: Tensor | None
    right_variance: Tensor | None
    rank: int
    error: float = 0.0  # of the layer's standard deviations; see `deviation`


@dataclass
class Layer:
    """A layer whose variances may be factorised, and some of what entered it."""

    node: fx.Node
    args: tuple[Any, ...]  # of its kernel: some of what entered it, the weight, the bias, ...
    found: dict[int, Factors] = field(default_factory=dict)

    def choose(self, tolerance: float) -> Factors | None:
        """The factors of least rank within the tolerance; None if no rank that saves work is."""
        n, p = self.matrix.shape
        for rank in RANKS:
            if rank * (n + p) * WORTH > n * p:
                break
            if rank not in self.found:
                self.found[rank] = self._factors(rank)
            if self.found[rank].error <= tolerance:
                return self.found[rank]
        return None

    @property
    def x(self) -> Gaussian | Tensor:
        return self.args[0]

    @property
    def weight(self) -> Tensor:
        return self.args[1]

    @property
    def form(self) -> LowRankForm:
        return FORMS[self.node.target]

    @cached_property
    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        """What meets `m²`, and what meets `v`."""
        return self.form.parts(self.args)

    @cached_property
    def matrix(self) -> Tensor:
        return torch.cat([part.flatten(1) for part in self.parts if part is not None], dim=1).float()

    @cached_property
    def profile(self) -> Tensor:
        """How large each input is on average, half evened out so that none counts for nothing."""
        sources = mean_of(self.x).square(), self.x.variance if isinstance(self.x, Gaussian) else None
        weights = []
        for source, part in zip(sources, self.parts, strict=True):
            if part is not None:
                assert source is not None
                average = source.transpose(1, -1).flatten(0, -2).mean(0, dtype=torch.float32)  # over all but channels
                average = average + average.mean() + torch.finfo(torch.float32).tiny
                weights.append(average.repeat_interleave(part[0, 0].numel()))
        return torch.cat(weights)

    def _factors(self, rank: int) -> Factors:
        left, right = factorise(self.matrix * self.profile, rank)
        sizes = [0 if part is None else part[0].numel() for part in self.parts]
        pieces = (right / self.profile).split(sizes, dim=1)
        rights = [
            None if part is None else self._as_constant(piece.reshape(rank, *part.shape[1:]))
            for part, piece in zip(self.parts, pieces, strict=True)
        ]
        left = left.reshape(*left.shape, *[1] * (self.weight.dim() - 2))
        made = Factors(left.to(self.weight.dtype), rights[0], rights[1], rank)
        return replace(made, error=max(self._error(made, x) for x in (self.x, _varied(self.x))))

    def _as_constant(self, right: Tensor) -> Tensor:
        weight = self.weight
        order = torch.contiguous_format
        if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
            order = torch.channels_last
        return (right.t() if right.dim() == 2 else right).to(weight.dtype).clone(memory_format=order)

    def _error(self, factors: Factors, x: Gaussian | Tensor) -> float:
        target: Any = self.node.target
        args = (x, *self.args[1:])
        return deviation(target(*args), _factorised(self.form, args, factors))


def _factorised(form: LowRankForm, args: tuple[Any, ...], factors: Factors) -> Gaussian:
    return form.form(*form.arguments(args, factors.left, factors.right_mean, factors.right_variance))


def _varied(x: Gaussian | Tensor) -> Gaussian | Tensor:
    """Every entry made larger or smaller at random: `m²` and `v` by a log-normal factor."""
    generator = torch.Generator().manual_seed(0)

    def factor(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator).exp().to(t)

    if isinstance(x, Tensor):
        return x * factor(x).sqrt()
    return Gaussian.diagonal(x.mean * factor(x.mean).sqrt(), x.variance * factor(x.variance))


# -- the graph


class _Recorder(fx.Interpreter):
    """Runs the graph and keeps what enters each layer."""

    def __init__(self, body: fx.GraphModule):
        super().__init__(body)
        self.layers: list[Layer] = []

    def run_node(self, n: fx.Node) -> Any:
        form = FORMS.get(n.target) if n.op == "call_function" else None
        if form is not None:
            x, weight, *rest = self.fetch_args_kwargs_from_env(n)[0]
            if not _is_special(weight, form.arguments((x, weight, *rest), None, None, None)[-1]):
                self.layers.append(Layer(n, (_some(x, weight.dim()), weight, *rest)))
        return super().run_node(n)


class _Replacing(fx.Interpreter):
    """Runs the graph with other forms of some layers."""

    def __init__(self, body: fx.GraphModule, chosen: dict[fx.Node, Factors]):
        super().__init__(body)
        self.chosen = chosen

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.chosen:
            return super().run_node(n)
        return _factorised(FORMS[n.target], self.fetch_args_kwargs_from_env(n)[0], self.chosen[n])


def _is_special(weight: Tensor, setting: Any) -> bool:
    """Grouped and transposed convolutions, whose kernels are not one matrix."""
    return weight.dim() > 2 and (setting[4] or setting[-1] != 1)


def _some(x: Gaussian | Tensor, dims: int) -> Gaussian | Tensor:
    """Rows for a linear layer, samples for a convolution: some of them, evenly from all."""

    def some(t: Tensor) -> Tensor:
        rows = t.reshape(-1, t.shape[-1]) if dims == 2 else t
        return rows[:: -(-len(rows) // (ROWS if dims == 2 else SAMPLES))].clone()

    return some(x) if isinstance(x, Tensor) else Gaussian.diagonal(some(x.mean), some(x.variance))


def _install(body: fx.GraphModule, chosen: dict[fx.Node, Factors]) -> None:
    """Put the low-rank forms into the graph, and drop the constants that nothing reads any more."""
    for node, factors in chosen.items():
        with body.graph.inserting_before(node):
            tensors = (factors.left, factors.right_mean, factors.right_variance)
            parts = [
                None if tensor is None else _buffer(body, f"{node.name}_{name}", tensor)
                for name, tensor in zip(("left", "right_mean", "right_variance"), tensors, strict=True)
            ]
        form = FORMS[node.target]
        node.target, node.args = form.form, form.arguments(node.args, *parts)
    body.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    used = {n.target for n in body.graph.nodes if n.op == "get_attr"}
    for name in [name for name, _ in body.named_buffers(recurse=False) if name not in used]:
        delattr(body, name)
    body.recompile()


def _buffer(body: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    body.register_buffer(name, value)
    return body.graph.get_attr(name)


def _described(step: Step, chosen: dict[fx.Node, Factors]) -> Step:
    factors = next((f for node, f in chosen.items() if node.meta.get(STEP) is step), None)
    if factors is None:
        return step
    note = f"{step.note}; variances of rank {factors.rank} ({factors.error:.1%} off)"
    return replace(step, rule=f"{step.rule}, low rank", note=note)
