"""Kronecker-factored posteriors, in the eigenbasis of their factors.

A weight stored as `[rows, cols]` has curvature `H = B ⊗ A` (row-major; `B [rows, rows]`, `A [cols, cols]`) and
covariance `(H + δ I)⁻¹`. With `B = Q_B Λ_B Q_Bᵀ`, `A = Q_A Λ_A Q_Aᵀ` that is exactly

    (Q_B ⊗ Q_A) diag(G) (Q_B ⊗ Q_A)ᵀ,    G_pq = 1 / (λ_Bp λ_Aq + δ)

so nothing has to be approximated. `damping="factored"` replaces `G_pq` by `1 / ((λ_Bp + √δ)(λ_Aq + √δ))`, the
approximation of the paper, which underestimates the covariance whenever a factor has small eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from propagauss.checks import choice, floating, kind, moved, named, positive
from propagauss.errors import PosteriorError
from propagauss.gaussian import check_psd
from propagauss.posteriors.base import ByName, Noise, Posterior, check_draws, jacobian_of


@dataclass(frozen=True)
class Eigenfactors:
    """One parameter: `Q_B`, `Q_A` and the variances `G` in their basis. `right` is None for a single factor."""

    left: Tensor  # [rows, rows]
    right: Tensor | None  # [cols, cols]
    variance: Tensor  # [rows, cols], or [rows] for a single factor

    def map(self, f: Any) -> Eigenfactors:
        return Eigenfactors(f(self.left), None if self.right is None else f(self.right), f(self.variance))


class KroneckerPosterior(Posterior):
    """Posterior with covariance `(B ⊗ A + prior_precision I)⁻¹` for each parameter on its own.

    Args:
        factors: `{name: (B, A)}` for a weight (row-major; dimensions after the first are flattened into `A`) and
            `{name: (B,)}` for a parameter with a single factor, such as a bias.
        prior_precision: `δ > 0`; one number, or one per name.
        damping: "exact", or "factored" for the paper's `(B + √δ I)⁻¹ ⊗ (A + √δ I)⁻¹`.
        flatten: "row" for `B ⊗ A`; "column" if the factors of a weight are given as `(A, B)`, for `A ⊗ B` acting on
            column-flattened weights. Both describe the same posterior.
    """

    kind = "kronecker"

    def __init__(
        self,
        factors: Mapping[str, Sequence[Tensor]],
        prior_precision: float | Mapping[str, float] = 1.0,
        damping: Literal["exact", "factored"] = "exact",
        flatten: Literal["row", "column"] = "row",
    ):
        choice(damping, "damping", ("exact", "factored"), PosteriorError)
        choice(flatten, "flatten", ("row", "column"), PosteriorError)
        self._factors: dict[str, Eigenfactors] = ByName()
        self.shapes: dict[str, torch.Size] | None = None
        self.details: dict[str, float] = {}
        for name, matrices in named(factors, "factors", "{'0.weight': (B, A)}", PosteriorError).items():
            if isinstance(prior_precision, Mapping) and name not in prior_precision:
                raise PosteriorError(f"prior_precision has no entry for '{name}'")
            given = prior_precision[name] if isinstance(prior_precision, Mapping) else prior_precision
            precision = positive(given, f"the prior precision of '{name}'", PosteriorError)
            if not isinstance(matrices, (tuple, list)):
                raise PosteriorError(
                    f"the Kronecker factors of '{name}' are {kind(matrices)}; give (B, A) for a weight or (B,) for a "
                    "bias"
                )
            for factor in matrices:
                floating(factor, f"a Kronecker factor of '{name}'", PosteriorError)
            ordered = tuple(matrices)[::-1] if flatten == "column" else tuple(matrices)
            self._factors[name] = _decompose(name, ordered, precision, damping)
        if len({f.variance.dtype for f in self._factors.values()}) > 1:
            raise PosteriorError("Kronecker factors have mixed dtypes")

    @classmethod
    def from_eigen(cls, factors: Mapping[str, Eigenfactors]) -> KroneckerPosterior:
        """From eigenvectors and the posterior variances in their basis (what adapters to other libraries have)."""
        new = cls({})
        new._factors = ByName(factors)
        return new

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._factors)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._factors.values())).variance.dtype if self._factors else torch.get_default_dtype()

    def variance(self, name: str) -> Tensor:
        f = self._factors[name]
        v = f.left.square() @ f.variance
        v = v if f.right is None else v @ f.right.square().mT
        return v.reshape(self.shapes[name]) if self.shapes else v

    def covariance(self, name: str) -> Tensor:
        f = self._factors[name]
        basis = f.left if f.right is None else torch.kron(f.left, f.right)
        return (basis * f.variance.flatten()) @ basis.mT

    def noise(self, weight: str | None, bias: str | None, transposed: bool = False) -> Noise:
        w = None if weight is None else self._factors[weight]
        if w is not None and w.right is None:
            raise PosteriorError(f"'{weight}' is the weight of a linear layer and needs two factors (B, A), it has one")
        if w is not None and transposed:
            assert w.right is not None
            w = Eigenfactors(w.right, w.left, w.variance.mT)
        return KroneckerNoise(w, None if bias is None else self.covariance(bias))

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        count, draws = check_draws(count, generator), {}
        for name, f in self._factors.items():
            white = torch.randn((count, *f.variance.shape), generator=generator, dtype=self.dtype, device=f.left.device)
            z = white * f.variance.sqrt()
            z = z @ f.left.mT if f.right is None else f.left @ z @ f.right.mT
            draws[name] = z.reshape(count, *self.shape(name))
        return draws

    def quadratic(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        jacobian = jacobian_of(self, jacobian)
        total: Tensor | float = 0.0
        for name, f in self._factors.items():
            j = jacobian[name].reshape(*jacobian[name].shape[:2], *f.variance.shape)
            j = j @ f.left if f.right is None else f.left.mT @ j @ f.right
            j = (j * f.variance.sqrt()).flatten(2)
            total = total + j @ j.mT
        assert isinstance(total, Tensor)
        return total

    def to_dense(self) -> Tensor:
        return torch.block_diag(*[self.covariance(n) for n in self.names])

    def _scaled(self, factor: float) -> Self:
        return self._with({n: replace(f, variance=f.variance * factor) for n, f in self._factors.items()})

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._with({n: f.map(lambda t: moved(t, *args, **kwargs)) for n, f in self._factors.items()})

    def _keep(self, names: tuple[str, ...]) -> Self:
        return self._with({n: self._factors[n] for n in names})

    def _with(self, factors: dict[str, Eigenfactors]) -> Self:
        new = type(self)({})
        new._factors, new.shapes = ByName(factors), self.shapes
        new.details, new.fitted_on = dict(self.details), self.fitted_on
        return new

    def _bound(self, shapes: dict[str, torch.Size]) -> Self:
        new = self._with(self._factors)
        new.shapes = shapes
        return new

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        expected = tuple(self._factors[name].variance.shape)
        rows = shape[0] if len(shape) else 1
        actual = (shape.numel(),) if len(expected) == 1 else (rows, shape.numel() // max(rows, 1))
        if actual != expected:
            raise PosteriorError(
                f"the factors of '{name}' are for a parameter of {' x '.join(map(str, expected))} entries, "
                f"but it has shape {tuple(shape)}"
            )

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {}
        for name, f in self._factors.items():
            tensors |= {f"left:{name}": f.left, f"variance:{name}": f.variance}
            if f.right is not None:
                tensors[f"right:{name}"] = f.right
        return tensors, {"names": self.names}

    @classmethod
    def _from_state(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> KroneckerPosterior:
        factors = {
            n: Eigenfactors(tensors[f"left:{n}"], tensors.get(f"right:{n}"), tensors[f"variance:{n}"])
            for n in meta["names"]
        }
        for name, each in factors.items():
            matrices = [each.left] if each.right is None else [each.left, each.right]
            if [tuple(m.shape) for m in matrices] != [(n, n) for n in each.variance.shape]:
                raise PosteriorError(f"the factors of '{name}' do not fit each other")
            if not all(t.isfinite().all() for t in (*matrices, each.variance)) or (each.variance < 0).any():
                raise PosteriorError(f"the factors of '{name}' are not finite, or a variance is negative")
        return cls.from_eigen(factors)


class KroneckerNoise(Noise):
    """`noise = Q_B diag(t) Q_Bᵀ + Cov(b)`, `t = G s`, `s = diag(Q_Aᵀ S Q_A)`.

    `G_pq = 1 / (λ_Bp λ_Aq + δ)` is a Cauchy-like matrix, so to rounding it has a small rank `r`: `G = L R`. Then

        noise = Σ_k c_k M_k + Cov(b),   M_k = Q_B diag(L_:k) Q_Bᵀ,
        c_k = Σ_q R_kq s_q = Σ_ij S_ij (Q_A diag(R_k:) Q_Aᵀ)_ij

    which replaces the rotations of every sample's covariance, cubic in the width, by two products with fixed matrices.
    """

    rotation: Tensor  # Q_A [in, in]
    right: Tensor  # Rᵀ [in, r]
    left: Tensor  # Lᵀ, rotated and squared: [r, out]
    patterns: Tensor  # M, flattened: [r, out * out]
    probes: Tensor | None  # Q_A diag(R_k) Q_Aᵀ, flattened: [r, in * in]
    marginal: Tensor  # weight variances [out, in]
    bias: Tensor | None  # [out, out]

    def __init__(self, weight: Eigenfactors | None, bias: Tensor | None):
        super().__init__()
        if weight is not None and weight.right is None:
            raise PosteriorError("a weight matrix needs two Kronecker factors (B, A), got one")
        self.has_weight = weight is not None
        self._factors: tuple[Tensor, Tensor] | None = None
        self.register_buffer("bias", None if bias is None else bias.contiguous())
        if weight is None or weight.right is None:
            return
        q_b, q_a, dtype = weight.left.double(), weight.right.double(), weight.left.dtype
        left, right = _low_rank(weight.variance.double(), torch.finfo(dtype).eps)  # [out, r], [r, in]
        self._factors = weight.left, left  # only to build patterns: networks that keep variances need none
        self.register_buffer("rotation", weight.right.clone())
        self.register_buffer("right", right.mT.to(dtype).contiguous())
        self.register_buffer("left", (left.mT @ q_b.square().mT).to(dtype))
        self.register_buffer("patterns", None)
        self.register_buffer("probes", None)
        self.register_buffer("marginal", (q_b.square() @ weight.variance.double() @ q_a.square().mT).to(dtype))

    def for_covariance(self, random_input: bool) -> Noise:
        if self._factors is None:
            return self
        q_b, left, dtype = self._factors[0].double(), self._factors[1], self.rotation.dtype
        self.patterns = torch.einsum("kp,pr,lp->rkl", q_b, left, q_b).flatten(1).to(dtype)
        if random_input and self.right.shape[1] * self.rotation.shape[0] ** 2 <= _MOST_PROBES:
            q_a, right = self.rotation.double(), self.right.double()
            self.probes = torch.einsum("iq,qr,jq->rij", q_a, right, q_a).flatten(1).to(dtype)
        return self

    def weight_variance(self) -> Tensor | None:
        return self.marginal if self.has_weight else None

    def variance(self, m: Tensor) -> Tensor:
        if not self.has_weight:
            assert self.bias is not None
            return self.bias.diagonal().expand(*m.shape[:-1], -1)
        variance = ((m @ self.rotation).square() @ self.right @ self.left).clamp(min=0)
        return variance if self.bias is None else variance + self.bias.diagonal()

    def covariance(self, left: Tensor, right: Tensor, c: Tensor | None) -> Tensor:
        if not self.has_weight:
            assert self.bias is not None
            return self.bias.expand(*torch.broadcast_shapes(left.shape, right.shape)[:-1], -1, -1)
        rotated = left @ self.rotation
        s = rotated * (rotated if left is right else right @ self.rotation)
        coefficients = s @ self.right  # [..., r]
        if c is not None:
            coefficients = coefficients + probe(c, self.probes, self.rotation, self.right)
        out = self.left.shape[1]
        if self.bias is not None and coefficients.dim() == 2:  # the common case, as one accumulating product
            return torch.addmm(self.bias.view(-1), coefficients, self.patterns).view(-1, out, out)
        noise = (coefficients @ self.patterns).unflatten(-1, (out, out))
        return noise if self.bias is None else noise + self.bias

    def constants(self) -> tuple[Tensor | None, ...]:
        """What `covariance` computes with, for a rule that does so in a single function."""
        flat_bias = None if self.bias is None else self.bias.flatten()
        return self.rotation, self.right, self.patterns, flat_bias, self.probes


def probe(c: Tensor, probes: Tensor | None, rotation: Tensor, right: Tensor) -> Tensor:
    """`Σ_q R_kq (Q_Aᵀ c Q_A)_qq`: `[..., in, in] -> [..., r]`; by rotation where the layer is too wide for probes."""
    if probes is not None:
        return F.linear(c.flatten(-2), probes)
    return ((c @ rotation) * rotation).sum(-2) @ right


_MOST_PROBES = 2**25  # entries of the precomputed probes (128 MiB in single precision); wider layers rotate instead


def _low_rank(matrix: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """`L [out, r]`, `R [r, in]` with `L R` equal to `matrix` up to `precision` of its largest singular value."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = max(int((s > precision * s[0]).sum()), 1)
    return u[:, :rank] * s[:rank], vh[:rank]


def _decompose(name: str, matrices: tuple[Tensor, ...], precision: float, damping: str) -> Eigenfactors:
    if len({m.dtype for m in matrices}) > 1:
        raise PosteriorError(f"the Kronecker factors of '{name}' have mixed dtypes: convert them with .to()")
    if len(matrices) not in (1, 2):
        raise PosteriorError(
            f"'{name}' has {len(matrices)} Kronecker factors; give (B, A) for a weight or (B,) for a bias"
        )
    vectors, values = [], []
    for factor in matrices:
        if factor.dim() != 2 or factor.shape[0] != factor.shape[1]:
            raise PosteriorError(f"a Kronecker factor of '{name}' has shape {tuple(factor.shape)}; it must be square")
        if not factor.isfinite().all():
            raise PosteriorError(f"a Kronecker factor of '{name}' has values that are not finite")
        check_psd(factor, f"a Kronecker factor of '{name}'", PosteriorError)
        # double precision: eigenvalues far below the largest one decide the covariance
        lam, q = torch.linalg.eigh(factor.detach().double())
        vectors.append(q)
        values.append(lam.clamp(min=0))
    if len(matrices) == 1:
        return Eigenfactors(vectors[0], None, 1 / (values[0] + precision)).map(lambda t: t.to(matrices[0].dtype))
    left, right = values
    if damping == "factored":
        variance = 1 / torch.outer(left + math.sqrt(precision), right + math.sqrt(precision))
    else:
        variance = 1 / (torch.outer(left, right) + precision)
    return Eigenfactors(vectors[0], vectors[1], variance).map(lambda t: t.to(matrices[0].dtype))
