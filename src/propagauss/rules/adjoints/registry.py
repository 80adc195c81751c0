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
from typing import Any

import torch
from torch import Tensor

from propagauss.rules.registry import OpTable

Adjoint = Callable[..., Tensor]

ADJOINTS: dict[Any, Adjoint] = OpTable()
PER_SAMPLE: dict[Any, Adjoint] = OpTable()


def adjoint(*ops: Any, per_sample: bool = False) -> Callable[[Adjoint], Adjoint]:
    """Register the adjoint of one or more ops."""

    def register(function: Adjoint) -> Adjoint:
        (PER_SAMPLE if per_sample else ADJOINTS).update(dict.fromkeys(ops, function))
        return function

    return register


def pulled_back(g: Tensor, path: tuple[int, ...], op: Any, y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Any op with a derivative, by automatic differentiation; `path` leads to the argument, also into lists."""
    if isinstance(g, list):
        return _pulled_back_parts(g, path, op, y, args, kwargs)
    _, pull = torch.func.vjp(_of_one(op, path, args, kwargs), _at(args, path))
    lead = g.shape[: g.dim() - y.dim()]
    rows = torch.func.vmap(lambda row: pull(row)[0])(g.reshape(-1, *y.shape))
    return rows.reshape(*lead, *rows.shape[1:])


def _pulled_back_parts(
    parts: list[Tensor | None], path: tuple[int, ...], op: Any, ys: Any, args: Any, kwargs: dict[str, Any]
) -> Tensor:
    """An op with several results, of which some are not used."""
    used = [i for i, g in enumerate(parts) if g is not None]
    whole = _of_one(op, path, args, kwargs)
    _, pull = torch.func.vjp(lambda x: tuple(whole(x)[i] for i in used), _at(args, path))
    some: Any = parts[used[0]]
    lead = some.shape[: some.dim() - ys[used[0]].dim()]
    rows = torch.func.vmap(lambda *row: pull(row)[0])(*(parts[i].reshape(-1, *ys[i].shape) for i in used))  # type: ignore[union-attr]
    return rows.reshape(*lead, *rows.shape[1:])


def pulled_back_per_sample(
    g: Tensor, path: tuple[int, ...], op: Any, dims: tuple[int | None, ...], out: int, *args: Any, **kwargs: Any
) -> Tensor:
    """The same for a parameter, sample by sample.

    `dims` and `out` are the dimensions that count samples in arguments and result; the next one holds a sample's rows.
    """

    def single(row: Tensor, *sample: Any) -> Tensor:
        _, pull = torch.func.vjp(_of_one(op, path, sample, kwargs), _at(sample, path))
        return pull(row)[0]

    samples = torch.func.vmap(single, in_dims=(out, *(_in_dims(a, d) for a, d in zip(args, dims, strict=True))))
    return torch.func.vmap(lambda row: samples(row, *args))(g)


def _in_dims(arg: Any, dim: int | None) -> Any:
    """`in_dims` of an argument: one number for a tensor, a list of them for a list."""
    return [None] * len(arg) if isinstance(arg, (list, tuple)) else dim


def _at(args: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        args = args[i]
    return args


def _of_one(op: Any, path: tuple[int, ...], args: Any, kwargs: dict[str, Any]) -> Callable[[Tensor], Any]:
    """An op as a function of one of its arguments."""

    def put(values: Any, where: tuple[int, ...], x: Tensor) -> Any:
        if not where:
            return x
        return type(values)(put(v, where[1:], x) if j == where[0] else v for j, v in enumerate(values))

    return lambda x: op(*put(tuple(args), path, x), **kwargs)


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
