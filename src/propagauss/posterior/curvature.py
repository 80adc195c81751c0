"""The generalised Gauss-Newton matrix of a model, as a diagonal, as Kronecker factors, or dense.

    H = Σ_n J_nᵀ Λ_n J_n = Σ_n Σ_c r_nc r_ncᵀ,    r_nc = J_nᵀ s_nc

`J_n` is the Jacobian of the outputs for sample `n`, `Λ_n = Σ_c s_nc s_ncᵀ` the Hessian of its loss in the outputs. Work goes one
column `c` at a time, so a Jacobian of all outputs is never stored. Each class below holds one structure: `add` takes
a batch, `eigenvalues` serves the choice of the prior, `posterior` adds the prior and inverts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.posterior.base import Posterior
from propagauss.posterior.capture import Capture, Layer, Use
from propagauss.posterior.diagonal import DiagonalPosterior
from propagauss.posterior.full import FullPosterior
from propagauss.posterior.kronecker import Eigenfactors, KroneckerPosterior

BUDGET = 2**28  # bytes for the per-sample gradients or image patches that are alive at one time


class Forward:
    """A model as a function of its parameters, which are never written to.

    Detached copies (sharing memory) stand in for the parameters, so that no graph is built before the first chosen one.
    """

    def __init__(self, model: nn.Module, chosen: tuple[str, ...]):
        self.model, self.chosen = model, chosen
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}
        self.vectorised = True  # until torch.vmap turns out not to cope with the model

    def __call__(self, x: Any, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
        parameters = {**self.parameters, **(replaced or {})}
        return _tensor(torch.func.functional_call(self.model, parameters, args, kwargs))

    def capture(self, x: Any) -> tuple[Tensor, Capture]:
        with Capture({id(self.parameters[n]): n for n in self.chosen}) as seen:
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
    return output


@dataclass
class Batch:
    """A batch after its forward pass.

    Attributes:
        x: tensor, tuple or dict.
        size: number of samples `B`.
        output: `[B, C]`, with its graph.
        column: `c -> [B, C]`, column `c` of the root of the loss Hessian of every sample.
    """

    forward: Forward
    x: Any
    size: int
    output: Tensor
    seen: Capture
    column: Callable[[int], Tensor]

    def pull(self, uses: list[Use]) -> Iterator[list[Tensor]]:
        """For each column, the gradients at the outputs of `uses`: `[rows, G, out / G]`."""
        columns = self.output.shape[1] if uses and self.output.requires_grad else 0
        for c in range(columns):
            probes = [u.probe for u in uses]
            grads = torch.autograd.grad(self.output, probes, self.column(c), retain_graph=True, allow_unused=True)
            pairs = zip(uses, grads, strict=True)
            yield [u.layer.gradients(torch.zeros_like(u.probe) if g is None else g) for u, g in pairs]

    @cached_property
    def direct(self) -> dict[str, list[Use]]:
        """Parameters whose per-sample gradients follow from their uses, as the rows of one sample lie together."""
        whole = [self._lies_by_sample(use, i) for i, use in enumerate(self.seen.uses)]
        table: dict[str, list[Use]] = {}
        spoilt = set(self.seen.others)
        for use, good in zip(self.seen.uses, whole, strict=True):
            for name in (use.weight, use.bias):
                if name is not None:
                    table.setdefault(name, []).append(use)
                    spoilt |= set() if good else {name}
        return {name: uses for name, uses in table.items() if name not in spoilt}

    @cached_property
    def _reversed(self) -> list[Use]:
        """The uses when the samples come in the opposite order."""
        with torch.no_grad():
            return self.forward.capture(self.part(slice(None), lambda t: t.flip(0)))[1].uses

    def _lies_by_sample(self, use: Use, index: int) -> bool:
        """Shapes cannot tell [batch, time] from [time, batch] or from something all samples share; values can."""
        if use.layer.input.shape[0] % self.size or len(self._reversed) != len(self.seen.uses):
            return False
        rows, mirrored = (u.layer.input.reshape(self.size, -1) for u in (use, self._reversed[index]))
        tolerance = 1e3 * torch.finfo(rows.dtype).eps * float(rows.abs().amax()) if rows.numel() else 0.0
        return rows.shape == mirrored.shape and bool((rows - mirrored.flip(0)).abs().amax() <= tolerance)

    def part(self, which: slice, change: Callable[[Tensor], Tensor] = lambda t: t) -> Any:
        """The input of some samples."""
        return pytree.tree_map(lambda t: change(t[which]) if self.carries(t) else t, self.x)

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
    uses = [u for u in batch.seen.uses if u.weight in direct or u.bias in direct]
    pulled = batch.pull(uses)
    for c in range(batch.output.shape[1]):
        gradients = next(pulled, [])
        for chunk in batch.chunks(names):
            found = {n: _from_uses(batch, n, uses, gradients, chunk) for n in direct}
            yield found | (_one_by_one(batch, rest, c, chunk) if rest else {})


def _from_uses(batch: Batch, name: str, uses: list[Use], gradients: list[Tensor], chunk: slice) -> Tensor:
    """`Σ_t g_t a_tᵀ` for a weight, `Σ_t g_t` for a bias, summed over the uses: `[b, *shape]`."""
    parameter = batch.forward.parameters[name]
    total = parameter.new_zeros((chunk.stop - chunk.start, *parameter.shape))
    for use, g in zip(uses, gradients, strict=bool(gradients)):
        g = g.unflatten(0, (batch.size, -1))[chunk]  # [b, positions, G, out / G]
        if use.weight == name:
            a = use.layer.inputs(use.layer.input.unflatten(0, (batch.size, -1))[chunk].flatten(0, 1))
            product = torch.einsum("btgo,btgi->bgoi", g, a.unflatten(0, g.shape[:2]))
            total += _as_stored(product, use.layer).reshape(total.shape)
        if use.bias == name:
            total += g.sum(1).reshape(total.shape)
    return total


def _as_stored(product: Tensor, layer: Layer) -> Tensor:
    return product if layer.stored == "[out, in]" else product.transpose(-2, -1)


def _one_by_one(batch: Batch, names: list[str], c: int, chunk: slice) -> dict[str, Tensor]:
    """Gradients of parameters that are used in any way at all, by treating every sample as a batch of its own."""
    column = batch.column(c)[chunk]
    if batch.forward.vectorised:
        try:
            return _vectorised(batch, names, column, chunk)
        except (RuntimeError, ValueError) as error:
            batch.forward.vectorised = False
            reason = str(error).strip().split("\n")[0]
            warnings.warn(
                f"torch.vmap cannot run this model ({reason}): the gradients of {', '.join(names)} are computed one "
                "sample at a time, which is slow; choose fewer parameters= if it takes too long",
                stacklevel=2,
            )
    rows = [_single(batch, names, column[i], chunk.start + i) for i in range(len(column))]
    return {n: torch.stack([row[n] for row in rows]) for n in names}


def _vectorised(batch: Batch, names: list[str], column: Tensor, chunk: slice) -> dict[str, Tensor]:
    leaves, spec = pytree.tree_flatten(batch.x)
    carries = [batch.carries(leaf) for leaf in leaves]
    chosen = {n: batch.forward.parameters[n] for n in names}

    def single(s: Tensor, *parts: Any) -> dict[str, Tensor]:
        lone = [p.unsqueeze(0) if one else p for p, one in zip(parts, carries, strict=True)]
        x = pytree.tree_unflatten(lone, spec)
        _, pullback = torch.func.vjp(lambda p: batch.forward(x, p).reshape(-1), chosen)
        return pullback(s)[0]

    parts = [leaf[chunk] if one else leaf for leaf, one in zip(leaves, carries, strict=True)]
    in_dims = (0, *(0 if one else None for one in carries))
    return torch.func.vmap(single, in_dims=in_dims)(column, *parts)


def _single(batch: Batch, names: list[str], column: Tensor, index: int) -> dict[str, Tensor]:
    chosen = {n: batch.forward.parameters[n].clone().requires_grad_() for n in names}
    output = batch.forward(batch.part(slice(index, index + 1)), chosen).reshape(-1)
    grads = torch.autograd.grad(output, list(chosen.values()), column, allow_unused=True)
    pairs = zip(chosen.items(), grads, strict=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}


# -- the three structures; sums are kept in double precision


class DiagonalCurvature:
    """`diag(H)`, exact."""

    def __init__(self, forward: Forward):
        self.forward, self.names = forward, forward.chosen
        self._sums = {n: torch.zeros_like(forward.parameters[n], dtype=torch.float64) for n in self.names}

    def add(self, batch: Batch) -> None:
        quick = {n: u[0] for n, u in batch.direct.items() if len(u) == 1 and u[0].rows == batch.size}
        self._add_single_rows(batch, quick)
        rest = [n for n in self.names if n not in quick]
        for gradients in per_sample_gradients(batch, rest) if rest else ():
            for name, g in gradients.items():
                self._sums[name] += g.square().sum(0)

    def _add_single_rows(self, batch: Batch, quick: dict[str, Use]) -> None:
        """A layer applied once per sample has `r = g aᵀ`, so `Σ_c r²` is `(Σ_c g²) (a²)ᵀ`: one product for all."""
        uses = [u for u in batch.seen.uses if any(u is q for q in quick.values())]
        squares: list[Tensor] = []
        for gradients in batch.pull(uses):
            new = [g.square() for g in gradients]
            squares = [s.add_(n) for s, n in zip(squares, new, strict=True)] if squares else new
        for use, s in zip(uses, squares, strict=bool(squares)):
            if use.weight is not None and quick.get(use.weight) is use:
                a = use.layer.inputs(use.layer.input).square()
                total = self._sums[use.weight]
                total += _as_stored(torch.einsum("ngo,ngi->goi", s, a), use.layer).reshape(total.shape)
            if use.bias is not None and quick.get(use.bias) is use:
                self._sums[use.bias] += s.sum(0).reshape(self._sums[use.bias].shape)

    def eigenvalues(self) -> np.ndarray:
        return torch.cat([s.flatten() for s in self._sums.values()]).cpu().numpy()

    def posterior(self, prior_precision: float, noise: float) -> Posterior:
        """`1 / (diag(H) / σ² + δ)`"""
        dtype = self.forward.parameters[self.names[0]].dtype
        return DiagonalPosterior({n: (1 / (s / noise**2 + prior_precision)).to(dtype) for n, s in self._sums.items()})


@dataclass
class _Sums:
    """Over the rows of one layer: `Σ a aᵀ` (None for a bias alone), `Σ_c Σ g gᵀ`, and the number of rows."""

    layer: Layer
    b: Tensor  # [out, out]
    a: Tensor | None = None  # [in, in]
    rows: int = 0


class KroneckerCurvature:
    """KFAC: `H ≈ B ⊗ A` for a weight, `B` for a bias, `A = mean(a aᵀ)` and `B = Σ_c Σ g gᵀ` over rows.

    A row is one sample at one position, so a layer applied to sequences, to images or several times gets the "expand"
    form of KFAC, which leaves out products between different positions. In a grouped convolution the groups share `A`
    and `B` has one block per group.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self._sums: dict[tuple[str | None, str | None], _Sums] = {}
        self._unfit: set[str] = set()

    def add(self, batch: Batch) -> None:
        self._unfit |= batch.seen.others
        uses = batch.seen.uses
        for use in uses:
            self._add_inputs(use)
        for gradients in batch.pull(uses):
            for use, g in zip(uses, gradients, strict=True):
                blocks = torch.einsum("ngo,ngp->gop", g, g)
                self._sums[use.weight, use.bias].b += torch.block_diag(*blocks)

    def _add_inputs(self, use: Use) -> None:
        layer, key = use.layer, (use.weight, use.bias)
        if key not in self._sums:
            square = torch.zeros(layer.out, layer.out, dtype=torch.float64, device=use.probe.device)
            self._sums[key] = _Sums(layer, square)
        sums = self._sums[key]
        if (layer.stored, layer.groups) != (sums.layer.stored, sums.layer.groups):
            self._unfit |= {n for n in key if n is not None}
        if use.weight is None:
            return
        # image patches are many times larger than the image
        width = layer.weight.numel() // layer.out * layer.groups * use.rows * use.probe.element_size()
        for part in layer.input.split(max(1, BUDGET * layer.input.shape[0] // max(width, 1))):
            a = layer.inputs(part).flatten(0, 1)  # [rows * G, in]
            sums.a = (a.mT @ a).double() if sums.a is None else sums.a + a.mT @ a
            sums.rows += a.shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen parameters that are weights or biases of linear maps, and nothing else."""
        seen = {n for key in self._sums for n in key} - self._unfit
        return tuple(n for n in self.forward.chosen if n in seen)

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """`(B, A)` of a weight, `(B,)` of a bias; `(A, B)` for a weight stored as [in, out]."""
        keys = [key for key in self._sums if name in key]
        b = self._sums[keys[0]].b if len(keys) == 1 else torch.stack([self._sums[k].b for k in keys]).sum(0)
        mine = [self._sums[key] for key in keys if key[0] == name]
        if not mine:
            return (b,)
        a = torch.stack([s.a for s in mine if s.a is not None]).sum(0) / sum(s.rows for s in mine)
        return (b, a) if mine[0].layer.stored == "[out, in]" else (a, b)

    @cached_property
    def _eigen(self) -> dict[str, tuple[list[Tensor], Tensor]]:
        """Per name the eigenvectors of the factors, and the eigenvalues of `H` in the shape of the weight."""
        factors = {name: self.factors(name) for name in self.names}
        distinct = {id(f): f for fs in factors.values() for f in fs}  # a weight and its bias share B
        solved = {key: torch.linalg.eigh(f) for key, f in distinct.items()}
        parts = {}
        for name, fs in factors.items():
            values = [solved[id(f)].eigenvalues.clamp(min=0) for f in fs]
            h = values[0] if len(values) == 1 else torch.outer(*values)
            parts[name] = [solved[id(f)].eigenvectors for f in fs], h
        return parts

    def eigenvalues(self) -> np.ndarray:
        return torch.cat([h.flatten() for _, h in self._eigen.values()]).cpu().numpy()

    def posterior(self, prior_precision: float, noise: float) -> Posterior:
        """`(B ⊗ A / σ² + δ I)⁻¹`, exactly"""
        dtype = self.forward.parameters[self.names[0]].dtype
        factors = {}
        for name, (vectors, h) in self._eigen.items():
            right = vectors[1] if len(vectors) > 1 else None
            factors[name] = Eigenfactors(vectors[0], right, 1 / (h / noise**2 + prior_precision))
        return KroneckerPosterior.from_eigen({n: f.map(lambda t: t.to(dtype)) for n, f in factors.items()})


class FullCurvature:
    """Dense `H` over all chosen parameters, each flattened row by row, exact."""

    def __init__(self, forward: Forward):
        self.forward, self.names = forward, forward.chosen
        size = sum(forward.size(n) for n in self.names)
        first = forward.parameters[self.names[0]]
        # H, its eigenvectors, the covariance and the workspace of the eigendecomposition
        require_memory(4 * 8 * size**2, f"a full covariance over {size} parameters", first.device)
        self._matrix = torch.zeros(size, size, dtype=torch.float64, device=first.device)

    def add(self, batch: Batch) -> None:
        for gradients in per_sample_gradients(batch, list(self.names)):
            rows = torch.cat([gradients[n].flatten(1) for n in self.names], dim=1)
            self._matrix += rows.mT @ rows

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self._matrix)
        return values.clamp(min=0), vectors

    def eigenvalues(self) -> np.ndarray:
        return self._eigen[0].cpu().numpy()

    def posterior(self, prior_precision: float, noise: float) -> Posterior:
        """`(H / σ² + δ I)⁻¹`"""
        values, vectors = self._eigen
        covariance = (vectors / (values / noise**2 + prior_precision)) @ vectors.mT
        covariance = (covariance + covariance.mT) / 2
        return FullPosterior(self.names, covariance.to(self.forward.parameters[self.names[0]].dtype))


Curvature = DiagonalCurvature | KroneckerCurvature | FullCurvature


def require_memory(needed: int, what: str, device: torch.device) -> None:
    """Refuse before the machine starts to swap; says nothing where the size of the memory is not known."""
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if needed > available:
        raise InputError(
            f"{what} needs about {needed / 1e9:.3g} GB and the machine has {available / 1e9:.3g} GB: use "
            "structure='kronecker' or 'diagonal', or fewer parameters, such as those of the last layer"
        )
