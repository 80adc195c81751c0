"""What a builder may ask about the place of its op; see `rules.registry.Site`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from propagauss.nodes import hint, nodes_in
from propagauss.passes.demand import wanted_outputs
from propagauss.posteriors.base import Posterior
from propagauss.rules.registry import Options, Weight

if TYPE_CHECKING:
    from propagauss.passes.rewriting.rewrite import Rewriter


@dataclass(frozen=True)
class SiteOf:
    """What a builder may ask; see `rules.registry.Site`."""

    rewriter: Rewriter
    node: fx.Node

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
        return self.rewriter.options

    @property
    def posterior(self) -> Posterior | None:
        return self.rewriter.posterior

    @property
    def wanted_outputs(self) -> tuple[int, int] | None:
        return wanted_outputs(self.node, self.rewriter.wanted)

    def is_random(self, arg: Any) -> bool:
        return any(a in self.rewriter.random for a in nodes_in(arg))

    def is_parameter(self, arg: Any) -> bool:
        return arg in self.rewriter.unbatched

    def constant(self, arg: Any) -> Tensor | None:
        return self.rewriter.constant(arg)

    def weight(self, arg: Any) -> Weight | None:
        return self.rewriter.weight(arg)

    def shape(self, arg: Any) -> torch.Size:
        return torch.Size(hint(s) for s in arg.meta["val"].shape)

    def positions(self, arg: Any) -> int:
        return self.shape(arg)[:-1].numel() // self.rewriter.traced.batch
