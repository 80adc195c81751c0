"""What is compared with: random posteriors with their dense covariance, and `J Σ Jᵀ` by automatic differentiation.

Three things are left out by the library by design. The truth makes the same statements, and the models of the battery
mark where they apply:

- layers are independent of each other: `Σ` has one block per layer (weight and bias of a layer are one block);
- queries and keys of attention are held at their means: `held(t)`, and `F.scaled_dot_product_attention` by itself;
- in diagonal mode normalisation holds the statistics of a row: `held_if_diagonal(t)` where it is written in pieces.

`detach` is an identity for the library, but not for automatic differentiation: models write `stop(t)` for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg

STEP = 1e-4  # of the parameters, where derivatives are compared with differences
SCALE = 1e-10  # of all variances: terms of second order stay below the tolerance
Mode = Literal["full", "diagonal"]
Statement = Literal["full", "diagonal", "diagonal, nothing held", "first order"]
STRUCTURES = ("diagonal", "kronecker", "full", "low-rank")

# -- what a model is evaluated for: as it is, or for the truth of one of the two modes

_stating: list[Statement] = []


@contextmanager
def stating(what: Statement) -> Iterator[None]:
    """Inside, models make the statements of a mode; `first order` holds nothing, and goes through `stop`."""
    attend = F.scaled_dot_product_attention

    def attend_held(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *rest: Any, **more: Any) -> Any:
        return attend(held(q), held(k), v, None if attn_mask is None else held(attn_mask), *rest, **more)

    def drop(t: Tensor, *_: Any, **__: Any) -> Tensor:
        return t  # itself, as in evaluation mode; exported graphs forget that

    _stating.append(what)
    try:
        with mock.patch.multiple(F, scaled_dot_product_attention=attend_held, dropout=drop):
            yield
    finally:
        _stating.pop()


def held(t: Tensor) -> Tensor:
    """A value that both modes fix at its mean."""
    return t.detach() if _stating and _stating[-1] in ("full", "diagonal") else t


def held_if_diagonal(t: Tensor) -> Tensor:
    """A value that only the diagonal mode fixes at its mean."""
    return t.detach() if states_diagonal() else t


def states_diagonal() -> bool:
    """Whether a model is asked for what the diagonal mode states of it."""
    return bool(_stating) and _stating[-1].startswith("diagonal")


def stop(t: Tensor) -> Tensor:
    """`detach` as a model writes it: the library sees it, the truth goes through it."""
    return t if _stating else t.detach()


def unless_stating(value: Any) -> Any:
    """An argument that only stops gradients, such as the padding index of an embedding."""
    return None if _stating else value


# -- posteriors


def blocks(names: Sequence[str]) -> list[list[str]]:
    """The parameters that may depend on each other: weight and bias of one submodule."""
    found: dict[str, list[str]] = {}
    for name in names:
        prefix, _, last = name.rpartition(".")
        found.setdefault(prefix if prefix and last in ("weight", "bias") else name, []).append(name)
    return list(found.values())


def random_posterior(
    shapes: dict[str, torch.Size], structure: str, generator: torch.Generator, scale: float = SCALE
) -> tuple[pg.Posterior, Tensor]:
    """A posterior over parameters of these shapes, and the same as a matrix in the order of `shapes`."""
    make = {"diagonal": _diagonal, "kronecker": _kronecker, "full": _full, "low-rank": _low_rank}[structure]
    return make(shapes, generator, scale)


def _uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return 0.3 + torch.rand(tuple(shape), generator=generator, dtype=torch.float64)


def _definite(n: int, generator: torch.Generator) -> Tensor:
    root = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return root @ root.mT / n + 0.5 * torch.eye(n, dtype=torch.float64)


def _diagonal(shapes: Any, generator: torch.Generator, scale: float) -> tuple[pg.Posterior, Tensor]:
    variances = {n: scale * _uniform(s, generator) for n, s in shapes.items()}
    return pg.DiagonalPosterior(variances), torch.diag(torch.cat([v.flatten() for v in variances.values()]))


def _kronecker(shapes: Any, generator: torch.Generator, scale: float) -> tuple[pg.Posterior, Tensor]:
    factors, parts = {}, []
    for name, shape in shapes.items():
        rows, columns = (shape[0] if shape else 1), math.prod(shape[1:])
        pair = [_definite(rows, generator) / scale, _definite(columns, generator)][: 2 if len(shape) > 1 else 1]
        curvature = torch.kron(*pair) if len(pair) == 2 else pair[0]
        parts.append(torch.linalg.inv(curvature + torch.eye(len(curvature), dtype=torch.float64) / scale))
        factors[name] = tuple(pair)
    return pg.KroneckerPosterior(factors, prior_precision=1 / scale), torch.block_diag(*parts)


def _full(shapes: Any, generator: torch.Generator, scale: float) -> tuple[pg.Posterior, Tensor]:
    names = [n for block in blocks(list(shapes)) for n in block]
    parts = [_definite(sum(shapes[n].numel() for n in block), generator) for block in blocks(list(shapes))]
    covariance = scale * torch.block_diag(*parts)
    return pg.FullPosterior(names, covariance), _reordered(covariance, names, shapes)


def _low_rank(shapes: Any, generator: torch.Generator, scale: float, per_block: int = 2) -> tuple[pg.Posterior, Tensor]:
    variances = {n: scale * _uniform(s, generator) for n, s in shapes.items()}
    groups = blocks(list(shapes))
    directions = {}
    for i, block in enumerate(groups):
        for name in block:
            d = torch.zeros(len(groups), per_block, *shapes[name], dtype=torch.float64)
            d[i] = math.sqrt(scale) * torch.randn(per_block, *shapes[name], generator=generator, dtype=torch.float64)
            directions[name] = d.flatten(0, 1)
    wide = torch.cat([d.reshape(len(d), -1) for d in (directions[n] for n in shapes)], dim=1)
    own = torch.diag(torch.cat([v.flatten() for v in variances.values()]))
    return pg.LowRankPosterior(variances, directions), own + wide.mT @ wide


def _reordered(covariance: Tensor, names: list[str], shapes: Any) -> Tensor:
    """From the order of `names` to that of `shapes`."""
    starts, at = {}, 0
    for name in names:
        starts[name], at = at, at + shapes[name].numel()
    index = torch.cat([torch.arange(shapes[n].numel()) + starts[n] for n in shapes])
    return covariance[index][:, index]


# -- the Jacobian limit


def outputs_of(result: Any) -> list[Tensor]:
    """The float tensors among what a model returned."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [p for p in parts if isinstance(p, Tensor) and p.is_floating_point()]


def first_order(
    model: nn.Module, inputs: tuple[Tensor, ...], names: Sequence[str], covariance: Tensor, what: Statement
) -> list[Tensor]:
    """`J Σ Jᵀ` of every output, sample by sample: `[B, n, n]`."""
    return [rows @ covariance @ rows.mT for rows in _jacobians(model, inputs, tuple(names), what)]


def check_derivatives(model: nn.Module, inputs: tuple[Tensor, ...], names: Sequence[str]) -> None:
    """Automatic differentiation against differences along one direction: PyTorch takes some functions for constants."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    step = {n: STEP * torch.randn(parameters[n].shape, generator=generator, dtype=torch.float64) for n in names}
    flat = torch.cat([s.flatten() for s in step.values()]).to(torch.float64)

    def run(sign: int) -> list[Tensor]:
        moved = {n: (parameters[n] + sign * s).to(parameters[n].dtype) for n, s in step.items()}
        return outputs_of(torch.func.functional_call(model, parameters | moved, inputs))

    with stating("first order"), torch.no_grad():
        changes = [(after - before) / 2 for after, before in zip(run(1), run(-1), strict=True)]
    for rows, change in zip(_jacobians(model, inputs, tuple(names), "first order"), changes, strict=True):
        expected = change.to(rows.dtype).reshape(rows.shape[:2])
        size = max(float(expected.abs().max()), STEP * 1e-6) if expected.numel() else 0.0
        torch.testing.assert_close(rows @ flat.to(rows.dtype), expected, rtol=0, atol=0.01 * size)


@lru_cache(maxsize=2)  # of one model, which is asked for with several covariances
def _jacobians(model: nn.Module, inputs: tuple[Tensor, ...], names: tuple[str, ...], what: Statement) -> list[Tensor]:
    """`[B, n, P]` for every output."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    random = {n: parameters[n] for n in names}

    def run(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(outputs_of(torch.func.functional_call(model, parameters | values, inputs)))

    with stating(what):
        jacobians = torch.func.jacrev(run, chunk_size=1)(random)
    found = []
    for jacobian in jacobians:
        shape = next(iter(jacobian.values())).shape[: -random[names[0]].dim() or None]
        batch = shape[0] if len(shape) else 1
        found.append(torch.cat([jacobian[n].reshape(batch, math.prod(shape[1:]), -1) for n in names], dim=-1))
    return found
