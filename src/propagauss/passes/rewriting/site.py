"""One op of the traced graph, as rules and strategies see it; the part for rules is `rules.registry.Site`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.nodes import hint, nodes_in
from propagauss.passes.demand import wanted_outputs
from propagauss.passes.rewriting.new_graph import NewGraph
from propagauss.posteriors.base import Posterior
from propagauss.rules.registry import Options, Weight, map_arguments


@dataclass(frozen=True)
class OpSite:
    """An op with uncertain arguments `random`, and the graph that it is emitted into."""

    new: NewGraph
    node: fx.Node
    random: list[fx.Node]
    source: fx.Node | None = None  # the one uncertain value that the op is a function of, if there is one further back

    # -- what rules may ask

    @property
    def op(self) -> Any:
        return self.node.target

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.node.kwargs

    @property
    def options(self) -> Options:
        return self.new.options

    @property
    def posterior(self) -> Posterior | None:
        return self.new.posterior

    @property
    def wanted_outputs(self) -> tuple[int, int] | None:
        return wanted_outputs(self.node, self.new.wanted)

    def is_random(self, arg: Any) -> bool:
        return any(a in self.new.random for a in nodes_in(arg))

    def is_parameter(self, arg: Any) -> bool:
        return arg in self.new.unbatched

    def constant(self, arg: Any) -> Tensor | None:
        return self.new.constant(arg)

    def weight(self, arg: Any) -> Weight | None:
        return self.new.weight(arg)

    def shape(self, arg: Any) -> torch.Size:
        return torch.Size(hint(s) for s in arg.meta["val"].shape)

    def positions(self, arg: Any) -> int:
        return self.shape(arg)[:-1].numel() // self.new.traced.batch

    # -- what strategies ask besides

    @property
    def loose(self) -> list[fx.Node]:
        """The uncertain arguments that are made of parameters alone, without a batch."""
        return [r for r in self.random if r in self.new.unbatched]

    @property
    def is_unbatched(self) -> bool:
        return self.node in self.new.unbatched

    @property
    def occurrences(self) -> int:
        """How often uncertain values stand among the arguments, one that stands there twice counted twice."""
        found: list[fx.Node] = []
        map_arguments(self.node, lambda a: found.append(a) or a, lambda a: a)
        return sum(a in self.new.random for a in found)

    @property
    def reads_virtual(self) -> bool:
        return any(r in self.new.virtual for r in self.random)
