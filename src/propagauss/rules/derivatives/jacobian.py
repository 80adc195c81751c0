"""Any differentiable function of uncertain values, by its own Jacobian: `y = f(x_1, ..., x_k)`.

    full:      C = Σ_i J_i C_i J_iᵀ, and where arguments are correlated + Σ_{i≠j} J_i C_ij J_jᵀ
    diagonal:  var_k = Σ_i Σ_c (J_i)_kc² v_ic

Both are exact to first order, the second for independent entries.

A `Piece` is such a function cut out of a traced graph. Its Jacobian is never stored unless a parameter becomes part of
every sample; what is needed are products of it with the columns of a covariance. They are taken op by op
where all of its derivatives are known (`tangent`), and by forward-mode differentiation elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from propagauss.gaussian import Gaussian, mean_of, push_rows
from propagauss.nodes import argument, is_custom
from propagauss.rules.derivatives.tangent import along, is_affine
from propagauss.rules.elementwise.slopes import with_slope

ENTRIES_AT_ONCE = 2**22  # of the columns of a Jacobian that are worked on together, in the diagonal structure


class Piece(nn.Module):
    """`f(*values, *extras)`, the values uncertain.

    Args:
        function: takes the values, then the extras.
        batched: for each uncertain value, whether it has a batch (a parameter has none).
        result_batched: whether the result has one; a parameter then becomes part of every sample.
        samples: how many leading dimensions of the result count samples, and how many of their rows are one sample.
        pointwise: whether entry k of the result depends on entry k of the only value alone.
    """

    def __init__(
        self,
        function: fx.GraphModule,
        batched: Sequence[bool],
        result_batched: bool = True,
        samples: tuple[int, int] | None = (1, 1),
        pointwise: bool = False,
    ):
        super().__init__()
        self.function = function
        known = [along(function, i) for i in range(len(batched))]
        self.along = nn.ModuleList([nn.Identity() if part is None else part for part in known])
        self.known = [part is not None for part in known]
        self.affine = [is_affine(function, i) for i in range(len(batched))]
        self.batched, self.samples = list(batched), samples
        self.backwards = any(map(_has_no_forward_derivative, function.graph.nodes))
        self.lifted = [result_batched and not b for b in batched]
        self.slope = with_slope(function) if pointwise and not any(self.affine) else None

    def forward(self, *values: Any) -> Tensor:
        return self.function(*values)

    def pushed(self, i: int, values: tuple[Any, ...], rows: Tensor) -> Tensor:
        """`J_i` times each of many deviations: `[r, *shape of value i] -> [r, *shape of the result]`."""
        if self.known[i]:
            return _each(lambda t: self.along[i](t, *values), rows)

        def f(x: Tensor) -> Tensor:
            return self.function(*values[:i], x, *values[i + 1 :])

        return derivative(f, values[i], rows, forward=not self.backwards)

    def carried(self, i: int, values: tuple[Any, ...], matrix: Tensor, batched: bool) -> Tensor:
        """`J_i M`: `[b, n_i, k] -> [b, n, k]`, with one matrix for each sample if `batched`, else one for all."""
        shape = values[i].shape
        if self.slope is not None:
            return self.slope(*values)[1].expand(shape).reshape(-1, matrix.shape[1], 1) * matrix
        if self.lifted[i] and batched:
            return self.jacobian(i, values) @ matrix
        if self.lifted[i]:
            return self._by_sample(self.pushed(i, values, matrix[0].mT.reshape(-1, *shape))).permute(1, 2, 0)
        if not self.batched[i] and batched:  # a matrix for each sample, of a value and a result without a batch
            rows = matrix.mT.reshape(-1, *shape)
            return self.pushed(i, values, rows).reshape(*matrix.mT.shape[:2], -1).mT
        return push_rows(matrix.mT, shape, lambda rows: self.pushed(i, values, rows)).mT

    def jacobian(self, i: int, values: tuple[Any, ...]) -> Tensor:
        """Of a value without a batch: `[B, n, n_i]`."""
        x = values[i]
        units = torch.eye(x.numel(), dtype=x.dtype, device=x.device).reshape(-1, *x.shape)
        return self._by_sample(self.pushed(i, values, units)).permute(1, 2, 0)

    def _by_sample(self, pushed: Tensor) -> Tensor:
        """`[r, *samples, ...] -> [r, B, n]`"""
        assert self.samples is not None
        lead, rows = self.samples
        entries = rows * math.prod(pushed.shape[1 + lead :])
        return pushed.reshape(pushed.shape[0], math.prod(pushed.shape[1 : 1 + lead]) // rows, entries)


def _has_no_forward_derivative(node: fx.Node) -> bool:
    """That of a custom op is zero, and that of a product of what meets at a place is wrong (2.13): nobody says so."""
    return is_custom(node.target) or (
        node.target == torch.ops.aten.scatter_reduce.two and argument(node, 4, "reduce") == "prod"
    )


class Linearised(nn.Module):
    """A piece of independent Gaussians, in the full structure."""

    def __init__(self, piece: Piece):
        super().__init__()
        self.piece = piece

    def forward(self, *args: Any) -> Gaussian:
        values = tuple(mean_of(a) for a in args)
        terms = [self._term(i, values, a.covariance) for i, a in enumerate(args) if isinstance(a, Gaussian)]
        return Gaussian.full(self.piece(*values), sum(terms[1:], terms[0]))

    def _term(self, i: int, values: tuple[Any, ...], c: Tensor) -> Tensor:
        """`J_i C_i J_iᵀ`"""
        if self.piece.lifted[i]:
            jacobian = self.piece.jacobian(i, values)
            return jacobian @ c @ jacobian.mT
        half = self.piece.carried(i, values, c, batched=True)
        return self.piece.carried(i, values, half.mT, batched=True)


class LinearisedVariances(nn.Module):
    """A piece of Gaussians with independent entries: `var_k = Σ_i Σ_c (J_i)_kc² v_ic`, some columns at a time.

    `apart` says for each value whether the piece keeps the samples of a batch apart: unit vectors then serve all of
    them at once, and there are as many as a sample has entries.
    """

    def __init__(self, piece: Piece, apart: Sequence[bool]):
        super().__init__()
        self.piece, self.apart = piece, list(apart)

    def forward(self, *args: Any) -> Gaussian:
        values = tuple(mean_of(a) for a in args)
        mean = self.piece(*values)
        total = torch.zeros_like(mean)
        for i, a in enumerate(args):
            if isinstance(a, Gaussian):
                total = total + self._term(i, values, a.variance, mean)
        return Gaussian.diagonal(mean, total)

    def _term(self, i: int, values: tuple[Any, ...], v: Tensor, mean: Tensor) -> Tensor:
        samples = v.shape[0] if self.apart[i] else 1
        if v.numel() == 0 or mean.numel() == 0:
            return torch.zeros_like(mean)
        v = v.reshape(samples, -1)
        columns = v.shape[1]
        step = max(1, ENTRIES_AT_ONCE // (mean.numel() + v.numel()))
        total = mean.new_zeros(samples, mean.numel() // samples)
        for start in range(0, columns, step):
            part = v[:, start : start + step]  # [samples, r]
            places = torch.arange(columns, device=v.device)
            units = (places[start : start + step].unsqueeze(1) == places).to(v.dtype)  # [r, columns]
            rows = units.unsqueeze(1).expand(-1, samples, -1).reshape(-1, *values[i].shape)
            pushed = self.piece.pushed(i, values, rows).reshape(part.shape[1], samples, -1)
            total = total + torch.einsum("rsk,sr->sk", pushed.square(), part)
        return total.reshape(mean.shape)


class Carry(nn.Module):
    """Covariance of a piece with some other value, from that of one of its arguments: `Cov(y, z) = J_i Cov(x_i, z)`."""

    def __init__(self, piece: Piece, at: int, batched: bool):
        super().__init__()
        self.piece, self.at, self.batched = piece, at, batched

    def forward(self, matrix: Tensor, *values: Any) -> Tensor:
        return self.piece.carried(self.at, tuple(map(mean_of, values)), matrix, self.batched)


class Correlated(nn.Module):
    """What the covariances between the arguments of an op add to its result: `J_i C_ij J_jᵀ` and its transpose."""

    def __init__(self, piece: Piece, pairs: Sequence[tuple[int, int]], batched: Sequence[bool]):
        super().__init__()
        self.piece, self.pairs, self.batched = piece, list(pairs), list(batched)

    def forward(self, independent: Gaussian, *args: Any) -> Gaussian:
        """`independent`: the result without them; `args`: the matrices, in the order of `pairs`, and the values."""
        matrices, values = args[: len(self.pairs)], tuple(map(mean_of, args[len(self.pairs) :]))
        total = independent.covariance
        for (i, j), matrix, batched in zip(self.pairs, matrices, self.batched, strict=True):
            half = self.piece.carried(i, values, matrix, batched)  # [b, n, n_j]
            lifts = batched or self.piece.lifted[i]
            term = self.piece.carried(j, values, half.mT, lifts)
            total = total + term + term.mT
        return Gaussian.full(independent.mean, total)


def derivative(f: Callable[[Tensor], Tensor], x: Tensor, rows: Tensor, forward: bool = True) -> Tensor:
    """The derivative of `f` at `x` along each of `rows [r, *x.shape]`: `[r, *f(x).shape]`.

    The derivative is outside the vectorisation: the other order cannot be exported. An op without a forward derivative
    is differentiated backwards twice, or, if it has no second derivative either, once for every entry of the result.
    Where `forward` is false there are ordinary gradients only, as for custom ops.
    """
    if not forward:
        return _along(rows, *_gradients(f, x))
    points = x.expand(rows.shape).clone()

    def many(t: Tensor) -> Tensor:
        return _each(f, t)

    try:
        return torch.func.jvp(many, (points,), (rows,))[1]
    except NotImplementedError:
        pass
    try:
        value, backward = _vjp(many, points)
        return _vjp(lambda u: backward(u)[0], torch.zeros_like(value))[1](rows)[0]
    except RuntimeError:
        value, backward = _vjp(f, x)
        return _along(rows, value, [backward(unit)[0] for unit in _units(value)])


def _gradients(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        value = f(at)
        return value, [torch.autograd.grad(value, at, unit, retain_graph=True)[0] for unit in _units(value)]


def _units(value: Tensor) -> Tensor:
    return torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)


def _along(rows: Tensor, value: Tensor, gradients: list[Tensor]) -> Tensor:
    """`J t` for many `t`, given a gradient for every entry of the value."""
    return (rows.flatten(1) @ torch.stack(gradients).flatten(1).mT).reshape(-1, *value.shape)


def _vjp(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    found: Any = torch.func.vjp(f, x)
    return found


def _each(f: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`f` of every row; one after the other where it cannot be vectorised."""
    try:
        return torch.vmap(f)(rows)
    except RuntimeError:
        return torch.stack([f(row) for row in rows])
