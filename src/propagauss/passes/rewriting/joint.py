"""Covariances between values of the full structure, for ops whose arguments share their randomness.

A residual sum `h + f(h)` with random weights in `f` is not a function of `h` alone, and its terms are not independent:

    Cov(y, z) = Σ_i J_i Cov(x_i, z)    for y = f(x_1, ..., x_k) and a value z that was there before y

Going back from the later of two values to its arguments, and again, one arrives at a value that both have in common, or
at randomness that they do not share. Whatever lies on the way is emitted only where an op needs it. The same holds
for a parameter that is used at several places, as long as it is small.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from propagauss.gaussian import Gaussian
from propagauss.passes.rewriting.new_graph import NewGraph
from propagauss.rules.derivatives.jacobian import Carry, Correlated
from propagauss.rules.elementwise.activation import MomentMatched

SHARED_ENTRIES = 2048  # of a parameter whose uses at several places are followed; a larger one is left out


class Joint:
    """What uncertain values have in common, and the nodes that compute their covariances."""

    def __init__(self, new: NewGraph):
        self.new = new
        self._origins: dict[fx.Node, frozenset[Any]] = {}
        self._order: dict[fx.Node, int] = {}
        self._between: dict[tuple[fx.Node, fx.Node], fx.Node | None] = {}
        self._pieces: dict[fx.Node, Any] = {}
        self.left_out: set[fx.Node] = set()  # parameters too large to be followed to all their uses

    def start(self, leaf: fx.Node) -> None:
        """A source of randomness: an input, or the parameters of a layer."""
        self._order[leaf] = len(self._order)
        name = self.new.traced.parameters.get(leaf.name)
        self._origins[leaf] = frozenset([leaf if name is None else _layer(name)])

    def link(self, node: fx.Node, random: list[fx.Node]) -> None:
        """An op on uncertain values."""
        self._order[node] = len(self._order)
        self._origins[node] = frozenset().union(*(self._origins[r] for r in random))

    def with_covariances(self, node: fx.Node, independent: fx.Node) -> fx.Node:
        """The result of an op, given that for independent arguments."""
        sources = self.new.sources(node)
        pairs = [(i, j) for j in range(len(sources)) for i in range(j)]
        found = {}
        for i, j in pairs:
            if node in self.new.built and all(self.new.weight(sources[k]) is not None for k in (i, j)):
                continue  # the rule knows the covariance of a layer's own parameters
            matrix = self.covariance(sources[i], sources[j])
            if matrix is not None:
                found[i, j] = matrix
        if not found:
            return independent
        piece, extras = self._piece(node)
        batched = [self._is_batched(sources[i], sources[j]) for i, j in found]
        inputs = (*found.values(), *map(self.new.plain, sources), *map(self.new.plain, extras))
        module = Correlated(piece, list(found), batched)
        return self.new.emit(f"{node.name}_joint", module, (independent, *inputs))

    def covariance(self, p: fx.Node, q: fx.Node) -> fx.Node | None:
        """`Cov(p, q) [b, n_p, n_q]` as a node of the new graph; None if they are independent."""
        if self._origins[p].isdisjoint(self._origins[q]):
            return None
        if self._order[p] < self._order[q]:
            transposed = self.covariance(q, p)
            return None if transposed is None else self.new.graph.call_function(_transposed, (transposed,))
        if (p, q) not in self._between:
            leaves = p.op == "placeholder" and q.op == "placeholder"
            found = self._own(p) if p is q else self._of_parameters(p, q) if leaves else self._carried(p, q)
            self._between[p, q] = found
        return self._between[p, q]

    def _of_parameters(self, p: fx.Node, q: fx.Node) -> fx.Node | None:
        """Of two parameters of one module, or of one that the graph has under two names."""
        first, second = (self.new.traced.parameters[n.name] for n in (p, q))
        posterior = self.new.posterior
        assert posterior is not None
        if first == second and p.meta["val"].numel() > SHARED_ENTRIES:
            self.left_out.add(p)
            return None
        block = posterior.covariance(first) if first == second else posterior.between(first, second)
        if block is None or max(block.shape) > SHARED_ENTRIES:
            return None
        return self.new.emit(f"{p.name}_with_{q.name}", Constant(block.unsqueeze(0)))

    def _own(self, p: fx.Node) -> fx.Node | None:
        if p.op == "placeholder" and p in self.new.unbatched and p.meta["val"].numel() > SHARED_ENTRIES:
            self.left_out.add(p)
            return None
        return self.new.graph.call_function(_covariance, (self.new.value(p),))

    def _carried(self, p: fx.Node, q: fx.Node) -> fx.Node | None:
        """`Σ_i J_i Cov(x_i, q)` over the arguments of p."""
        new, total = self.new, None
        sources = new.sources(p)
        for i, source in enumerate(sources):
            matrix = self.covariance(source, q)
            if matrix is None:
                continue
            if p in new.moments:
                module, inputs = new.moments[p]
                carry: nn.Module = MomentCarry(module)
            else:
                piece, extras = self._piece(p)
                carry = Carry(piece, i, self._is_batched(source, q))
                inputs = (*map(new.plain, sources), *map(new.plain, extras))
            term = new.emit(f"{p.name}_{source.name}_with_{q.name}", carry, (matrix, *inputs))
            total = term if total is None else new.graph.call_function(_sum, (total, term))
        return total

    def _piece(self, node: fx.Node) -> Any:
        if node not in self._pieces:
            self._pieces[node] = self.new.piece(node)
        return self._pieces[node]

    def _is_batched(self, p: fx.Node, q: fx.Node) -> bool:
        return p not in self.new.unbatched or q not in self.new.unbatched


class MomentCarry(nn.Module):
    """`Cov(g(x), z) = E[g'(x)] Cov(x, z)`, exact for jointly Gaussian x and z."""

    def __init__(self, module: MomentMatched):
        super().__init__()
        self.module = module

    def forward(self, matrix: Tensor, x: Gaussian, *rest: Any) -> Tensor:
        slope = self.module.moments(x.mean, x.variance, *rest)[2]
        return slope.reshape(-1, matrix.shape[1], 1) * matrix


class Constant(nn.Module):
    """A tensor that belongs to the network."""

    value: Tensor

    def __init__(self, value: Tensor):
        super().__init__()
        self.register_buffer("value", value.clone())

    def forward(self) -> Tensor:
        return self.value


def _layer(name: str) -> str:
    """The module that a parameter belongs to, which counts as one layer."""
    return name.partition(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]


def _covariance(x: Gaussian) -> Tensor:
    return x.covariance


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.mT


def _sum(a: Tensor, b: Tensor) -> Tensor:
    return a + b
