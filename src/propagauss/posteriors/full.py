"""A joint covariance over any set of named parameters; each layer uses its own block of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from propagauss.checks import floating, kind, moved, named
from propagauss.errors import PosteriorError
from propagauss.gaussian import check_psd, symmetric_root
from propagauss.posteriors.base import Noise, Posterior, check_draws, flat, jacobian_of, unknown


class FullPosterior(Posterior):
    """Joint Gaussian over the named parameters, each flattened row by row, in the order given.

    Args:
        names: parameters in the order of the covariance.
        covariance: `[P, P]`, symmetric positive semi-definite.
        shapes: shape of each parameter; taken from the model by `streamline` if not given.
    """

    kind = "full"

    def __init__(
        self,
        names: Sequence[str],
        covariance: Tensor,
        shapes: Mapping[str, torch.Size] | None = None,
    ):
        floating(covariance, "the covariance", PosteriorError)
        example = "list(dict(model.named_parameters()))"
        if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
            raise PosteriorError(f"names is {kind(names)}; a list of names of parameters is needed, such as {example}")
        names = tuple(names)
        if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
            raise PosteriorError(f"the covariance has shape {tuple(covariance.shape)}; it must be square")
        if len(set(names)) != len(names):
            raise PosteriorError("a parameter is named twice")
        if not covariance.isfinite().all():
            raise PosteriorError("the covariance has values that are not finite")
        check_psd(covariance, "the covariance", PosteriorError)
        if not names and len(covariance):
            raise PosteriorError(f"the covariance names no parameter: give their names in its order, such as {example}")
        self._fill(names, covariance.detach(), shapes)

    def _fill(self, names: tuple[str, ...], matrix: Tensor, shapes: Mapping[str, torch.Size] | None) -> None:
        """`matrix [P, ...]` has a row for each entry of the parameters."""
        self._order, self._kept, self._matrix = names, names, matrix
        self._root: Tensor | None = None  # of the covariance, kept between samples
        self.shapes, self.details = None, {}
        if shapes is not None:
            self._set_shapes(_sizes(shapes, names))

    @property
    def names(self) -> tuple[str, ...]:
        return self._kept

    @property
    def dtype(self) -> torch.dtype:
        return self._matrix.dtype

    def block(self, rows: str, columns: str) -> Tensor:
        """Cross-covariance of two parameters, each flattened: `[numel, numel']`."""
        return self._matrix[self._span(rows), self._span(columns)]

    def between(self, first: str, second: str) -> Tensor:
        return self.block(first, second)

    def covariance(self, name: str) -> Tensor:
        return self.block(name, name)

    def variance(self, name: str) -> Tensor:
        return self.covariance(name).diagonal().reshape(self.shape(name))

    def noise(self, weight: str | None, bias: str | None, transposed: bool = False) -> Noise:
        ww = wb = None
        if weight is not None:
            rows, cols = self.shape(weight)[0], self.shape(weight)[1:].numel()
            ww = self.covariance(weight).reshape(rows, cols, rows, cols)
            ww = ww.permute(1, 0, 3, 2) if transposed else ww  # [out, in, out, in]
        if weight is not None and bias is not None:
            wb = self.block(weight, bias).reshape(*self.shape(weight)[:1], -1, self.shape(bias).numel())
            wb = wb.transpose(0, 1) if transposed else wb  # [out, in, out]
        return FullNoise(ww, wb, None if bias is None else self.covariance(bias))

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        count = check_draws(count, generator)
        if self._root is None:
            self._root = symmetric_root(self.to_dense())
        root = self._root
        white = torch.randn((count, root.shape[0]), generator=generator, dtype=self.dtype, device=root.device)
        parts = (white @ root.mT).split([self.shape(n).numel() for n in self.names], dim=1)
        return {n: p.reshape(count, *self.shape(n)) for n, p in zip(self.names, parts, strict=True)}

    def quadratic(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        jacobian = jacobian_of(self, jacobian)
        j = torch.cat([flat(jacobian[n], 2) for n in self.names], dim=-1)
        return j @ self.to_dense() @ j.mT

    def to_dense(self) -> Tensor:
        if self._kept == self._order:
            return self._matrix
        index = self._index()
        return self._matrix[index][:, index]

    def _index(self) -> Tensor:
        """The rows of `_matrix` that belong to the parameters kept."""
        every = torch.arange(self._matrix.shape[0], device=self._matrix.device)
        return torch.cat([every[self._span(n)] for n in self._kept])

    def _scaled(self, factor: float) -> Self:
        return self._with(_matrix=self._matrix * factor)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._with(_matrix=moved(self._matrix, *args, **kwargs))

    def _keep(self, names: tuple[str, ...]) -> Self:
        return self._with(_kept=names)

    def _with(self, **attributes: Any) -> Self:
        new = copy.copy(self)
        vars(new).update(attributes, _root=None, details=dict(self.details))
        return new

    def _all_shapes(self, parameters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        return {n: parameters[n].shape for n in self._order if n in parameters}

    def _bound(self, shapes: dict[str, torch.Size]) -> Self:
        new = self._with()
        new._set_shapes((self.shapes or {}) | shapes)
        return new

    def _set_shapes(self, shapes: dict[str, torch.Size]) -> None:
        missing = [n for n in self._order if n not in shapes]
        if missing:
            raise PosteriorError(f"the covariance also covers '{missing[0]}', which the model does not have")
        total = sum(shapes[n].numel() for n in self._order)
        if total != self._matrix.shape[0]:
            raise PosteriorError(
                f"the covariance is {self._matrix.shape[0]} x {self._matrix.shape[0]}, but the parameters "
                f"{', '.join(self._order)} have {total} entries together"
            )
        self.shapes = shapes

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        if self.shape(name) != shape:
            raise PosteriorError(
                f"the posterior was made for '{name}' of shape {tuple(self.shape(name))}, it has {tuple(shape)}"
            )

    def _span(self, name: str) -> slice:
        start = 0
        for other in self._order:
            size = self.shape(other).numel()
            if other == name:
                return slice(start, start + size)
            start += size
        raise unknown(name, self._order)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"covariance": self._matrix}, {"order": self._order, "kept": self._kept}

    @classmethod
    def _from_state(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> FullPosterior:
        return cls(meta["order"], tensors["covariance"])._with(_kept=tuple(meta["kept"]))


def _sizes(shapes: Any, names: tuple[str, ...]) -> dict[str, torch.Size]:
    """The shape of every parameter."""
    named(shapes, "shapes", "{'0.weight': (4, 3)}", PosteriorError)
    for name in names:
        if name not in shapes:
            raise PosteriorError(f"shapes has no entry for '{name}'")
        found = shapes[name]
        if not isinstance(found, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in found):
            raise PosteriorError(f"the shape of '{name}' is {kind(found)}; sizes are needed, such as (4, 3)")
    return {name: torch.Size(shapes[name]) for name in names}


class FullNoise(Noise):
    """The sums of the paper's general case as one product: `vec(S) [in²] -> [out²]`, plus weight-bias terms."""

    bilinear: Tensor | None
    quadratic: Tensor | None
    cross: Tensor | None
    cross_diagonal: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor | None, cross: Tensor | None, bias: Tensor | None):
        """`weight: [out, in, out, in]`, `cross: [out, in, out]` (weight against bias), `bias: [out, out]`."""
        super().__init__()
        self.out = 0
        bilinear = quadratic = None
        if weight is not None:
            self.out, inputs = weight.shape[:2]
            bilinear = weight.permute(1, 3, 0, 2).reshape(inputs**2, self.out**2)  # [in*in, out*out]
            quadratic = weight.diagonal(dim1=0, dim2=2).reshape(inputs**2, self.out)  # [in*in, out]
        elif bias is not None:
            self.out = bias.shape[0]
        self.register_buffer("bilinear", bilinear)
        self.register_buffer("quadratic", quadratic)
        self.register_buffer("cross", None if cross is None else cross.transpose(0, 1).flatten(1).contiguous())
        cross_diagonal = None if cross is None else 2 * cross.diagonal(dim1=0, dim2=2)  # [in, out]
        self.register_buffer("cross_diagonal", cross_diagonal)
        self.register_buffer("bias", None if bias is None else bias.clone())

    def weight_variance(self) -> Tensor | None:
        if self.quadratic is None:
            return None
        inputs = round(self.quadratic.shape[0] ** 0.5)
        return self.quadratic.reshape(inputs, inputs, self.out).diagonal(dim1=0, dim2=1).contiguous()

    def variance(self, m: Tensor) -> Tensor:
        total = m.new_zeros((*m.shape[:-1], self.out))
        if self.quadratic is not None:
            total = total + (m.unsqueeze(-1) * m.unsqueeze(-2)).flatten(-2) @ self.quadratic
        if self.cross_diagonal is not None:
            total = total + m @ self.cross_diagonal
        if self.bias is not None:
            total = total + self.bias.diagonal()
        return total.clamp(min=0)  # a sum of cancelling terms: rounding may leave it just below zero

    def covariance(self, left: Tensor, right: Tensor, c: Tensor | None) -> Tensor:
        square = (self.out, self.out)
        if self.bilinear is None:
            assert self.bias is not None
            return self.bias.expand(*torch.broadcast_shapes(left.shape, right.shape)[:-1], *square)
        s = left.unsqueeze(-1) * right.unsqueeze(-2)  # [..., in, in]
        s = s if c is None else s + c
        total = (s.flatten(-2) @ self.bilinear).unflatten(-1, square)
        if self.cross is not None:  # Σ_i m_i Cov(W_ki, b_l) at one position, its transpose at the other
            here = (left @ self.cross).unflatten(-1, square)
            there = here if left is right else (right @ self.cross).unflatten(-1, square)
            total = total + here + there.mT
        return total if self.bias is None else total + self.bias
