"""What random parameters and uncertain inputs add to the covariance of one output.

What arrives at a parameter are the rows of its Jacobian, sample by sample. If it is independent of all others, its part
follows at once; else its rows are kept until those of all that it depends on have arrived.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from propagauss.passes.backwards.arguments import paths
from propagauss.passes.backwards.new_graph import NewGraph
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.roots import joint_root, own_root
from propagauss.rules.adjoints.forms import gram, squares


class Terms:
    """The parts of the covariance, as nodes; `leaves` are the random parameters of the graph, by their names."""

    def __init__(self, new: NewGraph, posterior: Posterior | None, full: bool, leaves: dict[fx.Node, str]):
        self.new, self.posterior, self.full, self.leaves = new, posterior, full, leaves
        self.terms: list[fx.Node] = []
        self.shared: dict[str, fx.Node] = {}  # Jacobians of parameters with several uses, so far
        self.jacobians: dict[str, fx.Node] = {}  # and of those that depend on each other
        self.kept = 0  # entries of Jacobians that are kept to the end

    def add(self, term: fx.Node) -> None:
        self.terms.append(term)

    def add_form(self, name: str, form: nn.Module, inputs: tuple[Any, ...]) -> None:
        """The part of a layer, by a form that adds it to what is there."""
        total = (self.terms.pop(),) if self.terms else ()
        self.terms.append(self.new.emit(name, form, (*inputs, *total)))

    def used_once(self, leaf: Any) -> bool:
        same = [n for n, name in self.leaves.items() if name == self.leaves[leaf]]
        return len(same) == 1 and sum(a is leaf for user in leaf.users for _, a in paths(user)) == 1

    def collect(self, leaf: fx.Node, g: fx.Node) -> None:
        """A parameter with several uses; the graph may have it under several names."""
        name = self.leaves[leaf]
        self.shared[name] = g if name not in self.shared else self.new.sum(self.shared[name], g)

    def finish(self, name: str, rows: fx.Node) -> None:
        """The part of a parameter that is independent of all others, or its Jacobian, to be kept."""
        assert self.posterior is not None
        root = own_root(self.posterior, name)
        if root is None:
            self.jacobians[name] = rows
            self.kept += 2 * self.posterior.shape(name).numel()
        else:
            self._form(name, root, (rows,))

    def total(self) -> fx.Node:
        """The covariance of the output, once all parameters have been met."""
        for name, rows in self.shared.items():
            self.finish(name, rows)
        if self.jacobians:
            assert self.posterior is not None
            names, root = joint_root(self.posterior, sorted(self.jacobians))
            self._form(names[0], root, tuple(self.jacobians[n] for n in names))
        total = self.terms[0]
        for term in self.terms[1:]:
            total = self.new.sum(total, term)
        return total

    def _form(self, name: str, root: nn.Module, rows: tuple[fx.Node, ...]) -> None:
        moved = self.new.emit(f"root_{name}", root, rows)
        self.terms.append(self.new.graph.call_function(gram if self.full else squares, (moved,)))
