"""Which adjoint belongs to which op, and what serves for all the others.

Sensitivities `g [*lead, *y.shape]` of the outputs to the result `y` of an op have leading dimensions of their own: one
that counts outputs, and a second that counts samples where the value itself has none (parameters, and what is made of
them). An adjoint treats leading dimensions alike, and reads the last ones as the op writes them:

    adjoint(g, i, y, *args, **kwargs) -> [*lead, *args[i].shape]

Where a parameter meets samples, its sensitivity must be kept apart for each of them. That is the work of the second
table: `g [K, B, ...]`, results `y [B, ...]`, and what comes out is `[K, B, *parameter.shape]`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from propagauss.nodes import is_custom
from propagauss.rules.facts import OpTable

Adjoint = Callable[..., Tensor]

ADJOINTS: dict[Any, Adjoint] = OpTable()
PER_SAMPLE: dict[Any, Adjoint] = OpTable()
PREPARED: dict[Any, Adjoint] = OpTable()
automatic: ContextVar[list[Any] | None] = ContextVar("automatic", default=None)  # ops whose derivative was automatic


def adjoint(*ops: Any, per_sample: bool = False) -> Callable[[Adjoint], Adjoint]:
    """Register the adjoint of one or more ops."""

    def register(function: Adjoint) -> Adjoint:
        (PER_SAMPLE if per_sample else ADJOINTS).update(dict.fromkeys(ops, function))
        return function

    return register


def prepared(op: Any) -> Callable[[Adjoint], Adjoint]:
    """Register `(*args, **kwargs) -> Tensor` of an op: what the adjoints of all its arguments need, as `ready`."""

    def register(function: Adjoint) -> Adjoint:
        PREPARED[op] = function
        return function

    return register


def pulled_back(g: Any, path: tuple[int, ...], op: Any, y: Any, /, *args: Any, **kwargs: Any) -> Tensor:
    """Any op with a derivative, by automatic differentiation; `path` leads to the argument, also into lists.

    An op with several results has lists of them and of their sensitivities, None for those that are not used.
    """
    _note(op)
    used, parts, results = _used(g, y)
    x = _at(args, path)
    pull = _puller(op, _of_one(op, path, args, kwargs, used), x)
    lead = parts[0].shape[: parts[0].dim() - results[0].dim()]
    rows = [g.reshape(lead.numel(), *y.shape) for g, y in zip(parts, results, strict=True)]
    return _each(pull, op, *rows).reshape(*lead, *x.shape)


def pulled_back_per_sample(
    g: Any, path: tuple[int, ...], op: Any, dims: Any, out: int, y: Any, /, *args: Any, **kwargs: Any
) -> Tensor:
    """The same for a parameter, sample by sample.

    `dims` and `out` are the dimensions that count samples in arguments and result; the next one holds a sample's rows.
    """
    _note(op)
    used, parts, _ = _used(g, y)

    def single(rows: tuple[Tensor, ...], *sample: Any) -> Tensor:
        pull: Any = torch.func.vjp(_of_one(op, path, sample, kwargs, used), _at(sample, path))[1]
        return pull(rows)[0]

    samples = torch.func.vmap(single, in_dims=(tuple(out for _ in parts), *dims))
    try:
        if is_custom(op):
            raise ValueError("cannot be vectorised")
        return _each(lambda *rows: samples(rows, *args), op, *parts)
    except (RuntimeError, ValueError):  # the op does not work on single samples, or not under vmap
        return _one_sample_at_a_time(parts, path, op, dims, out, used, args, kwargs)


def _note(op: Any) -> None:
    noted = automatic.get()
    if noted is not None:
        noted.append(op)


def _one_sample_at_a_time(
    parts: list[Tensor],
    path: tuple[int, ...],
    op: Any,
    dims: Any,
    out: int,
    used: list[int] | None,
    args: Any,
    kwargs: dict[str, Any],
) -> Tensor:
    """The whole op for every sample, with the sensitivities of all others set to zero: slow, but always right."""
    whole = [_merged(a, d) for a, d in zip(args, dims, strict=True)]
    pull = _puller(op, _of_one(op, path, whole, kwargs, used), _at(whole, path))
    count = parts[0].shape[1 + out]
    samples = torch.eye(count, dtype=parts[0].dtype, device=parts[0].device)

    def row(own: Tensor, *rows: Tensor) -> Tensor:
        kept = (r * own.reshape(-1, *[1] * (r.dim() - out - 1)) for r in rows)
        return pull(*(r.flatten(out, out + 1) for r in kept))

    return torch.stack([_each(lambda *rows, own=own: row(own, *rows), op, *parts) for own in samples], 1)


def _puller(op: Any, function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> Callable[..., Tensor]:
    """From one sensitivity of every result to that of `x`; custom ops have ordinary gradients only."""
    if not is_custom(op):
        pull: Any = torch.func.vjp(function, x)[1]
        return lambda *row: pull(row)[0]
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        results = function(at)
    return lambda *row: torch.autograd.grad(results, at, row, retain_graph=True)[0]


def _merged(arg: Any, dim: Any) -> Any:
    """An argument as it was, without a dimension for samples alone."""
    if isinstance(dim, (list, tuple)):
        return [_merged(a, d) for a, d in zip(arg, dim, strict=True)]
    return arg if dim is None else arg.flatten(dim, dim + 1)


def _each(function: Callable[..., Tensor], op: Any, *rows: Tensor) -> Tensor:
    """For every row; one after the other where PyTorch's vectorised derivative is wrong."""
    if rows[0].shape[0] == 1:
        return function(*(row[0] for row in rows)).unsqueeze(0)
    if op not in _ONE_BY_ONE and not is_custom(op):
        try:
            return torch.func.vmap(function)(*rows)
        except (RuntimeError, ValueError):
            pass  # an op that cannot be vectorised
    return torch.stack([function(*row) for row in zip(*rows, strict=True)])


_ONE_BY_ONE = {torch.ops.aten.cdist.default, torch.ops.aten._cdist_forward.default, torch.ops.aten.pdist.default}


def _used(g: Any, y: Any) -> tuple[list[int] | None, list[Tensor], list[Tensor]]:
    """The results whose sensitivities are known; None in place of their positions for an op with one result."""
    if not isinstance(g, (list, tuple)):
        return None, [g], [y]
    used = [i for i, part in enumerate(g) if part is not None]
    return used, [g[i] for i in used], [y[i] for i in used]


def _at(args: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        args = args[i]
    return args


def _of_one(
    op: Any, path: tuple[int, ...], args: Any, kwargs: dict[str, Any], used: list[int] | None
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """An op as a function of one of its arguments, with those of its results that are used."""

    def put(values: Any, where: tuple[int, ...], x: Tensor) -> Any:
        if not where:
            return x
        return type(values)(put(v, where[1:], x) if j == where[0] else v for j, v in enumerate(values))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        result = op(*put(tuple(args), path, x), **kwargs)
        return (result,) if used is None else tuple(result[i] for i in used)

    return function


def unbroadcast(g: Tensor, lead: int, shape: Any) -> Tensor:
    """Sum over what an argument of this shape was broadcast along: `[*lead, *y.shape] -> [*lead, *shape]`."""
    extra = g.dim() - lead - len(shape)
    if extra:
        g = g.sum(tuple(range(lead, lead + extra)))
    ones = [lead + d for d, size in enumerate(shape) if size == 1 and g.shape[lead + d] != 1]
    return g.sum(ones, keepdim=True) if ones else g


def unbroadcast_per_sample(g: Tensor, shape: Any) -> Tensor:
    """`[K, B, *y.shape[1:]] -> [K, B, *shape]` for a parameter that was broadcast against samples."""
    inner = shape[1:] if len(shape) == g.dim() - 1 else shape  # its first dimension is the one for samples, of size 1
    return unbroadcast(g, 2, inner).reshape(*g.shape[:2], *shape)
