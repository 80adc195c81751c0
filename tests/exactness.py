"""How far `linearise` is from the Jacobian form, for any model and every posterior structure.

In double precision both are the same numbers up to rounding. Some models compute steps in single precision whatever
they are given (`softmax(dtype=torch.float32)`, norms of language models); `in_double` does these in double as well.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import propagauss as pg
from propagauss.baselines import GLM
from reference import random_psd

STRUCTURES = ("diagonal", "kronecker", "full", "low-rank")
MOST_OF_ONE, MOST_OF_ALL = 800, 1200  # entries of the parameters that a full covariance is over


class in_double(TorchFunctionMode):
    """Inside, what asks for single precision gets double."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _doubled(func)(*map(_doubled, args), **{k: _doubled(v) for k, v in (kwargs or {}).items()})


def _doubled(value: Any) -> Any:
    if value is Tensor.float:
        return Tensor.double
    return torch.float64 if value is torch.float32 else value


def cast(x: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of an example in another type."""
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, x)


def make_posterior(model: nn.Module, structure: str) -> pg.Posterior:
    """Random, over all parameters; a full covariance is over small ones, starting at the output."""
    generator = torch.Generator().manual_seed(0)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def uniform(p: Tensor) -> Tensor:
        return 1e-3 * (0.3 + torch.rand(p.shape, generator=generator, dtype=torch.float64))

    def factors(p: Tensor) -> tuple[Tensor, ...]:
        sizes = (p.shape[0], p[0].numel()) if p.dim() > 1 else (p.numel(),)
        return tuple(random_psd(n, scale=30.0, generator=generator) for n in sizes)

    if structure == "diagonal":
        return pg.DiagonalPosterior({n: uniform(p) for n, p in parameters.items()})
    if structure == "kronecker":
        return pg.KroneckerPosterior({n: factors(p) for n, p in parameters.items()}, prior_precision=30.0)
    if structure == "low-rank":
        along = {n: 0.03 * torch.randn((3, *p.shape), generator=generator).double() for n, p in parameters.items()}
        return pg.LowRankPosterior({n: uniform(p) for n, p in parameters.items()}, along)
    chosen, entries = [], 0
    for name, p in reversed(parameters.items()):
        if p.numel() <= MOST_OF_ONE and entries + p.numel() <= MOST_OF_ALL:
            chosen.append(name)
            entries += p.numel()
    return pg.FullPosterior(chosen, random_psd(entries, scale=1e-3, generator=generator))


def called(f: Any, x: Any) -> Any:
    if isinstance(x, dict):
        return f(**x)
    return f(*x) if isinstance(x, tuple) else f(x)


def difference(model: nn.Module, x: Any, structure: str = "diagonal", **options: Any) -> float:
    """`max |C_kl - T_kl| / √(T_kk T_ll)` with the truth `T` from Jacobians, in double precision."""
    model, x = model.double(), cast(x, torch.float64)
    posterior = make_posterior(model, structure)
    with in_double(), torch.no_grad():
        truth = called(GLM(model, posterior), x)
        return relative(linearised(model, posterior, x, **options), truth)


def linearised(model: nn.Module, posterior: pg.Posterior, x: Any, **options: Any) -> pg.Gaussian:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model never uses")
        return called(pg.linearise(model, posterior, x, **options), x)


def relative(found: pg.Gaussian, truth: pg.Gaussian) -> float:
    """Of two full covariances, or of variances where the one that was found has no others."""
    scale = truth.variance.flatten(1).sqrt()
    if not found.is_full:
        return ((found.variance - truth.variance).flatten(1) / scale.square()).abs().amax().item()
    apart = (found.covariance - truth.covariance) / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    return apart.abs().amax().item()
