"""Products of several values, summed: every one of them is an Einstein sum `y_o = Σ Π_t x_t`.

For independent operands, with `G_S` the means of the operands outside a set `S` of uncertain ones, contracted onto the
letters of `S` and of the result, and with `m` and `C` standing for `m mᵀ` and `C`, one letter for each of their sides:

    variance:    Σ_S  Σ_{letters of S} G_S² Π_{s in S} v_s                   over all sets S that are not empty
    covariance:  Σ_t  Σ_{both letters} Π_{s < t} (m_s + C_s)  C_t  Π_{s > t} m_s     over the uncertain operands t

Exact first two moments. A letter that is summed without being in `S` is summed before the square is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from propagauss.gaussian import Gaussian, mean_of
from propagauss.rules.elementwise.arithmetic import independent_sum, stretched
from propagauss.rules.precision import in_full_precision
from propagauss.rules.registry import rule

aten = torch.ops.aten
Value = Gaussian | Tensor
Letters = list[int]


def product(operands: Sequence[Value], letters: Sequence[Letters], result: Letters, mean: Tensor) -> Gaussian:
    """The Einstein sum of `operands`, whose dimensions are named by `letters`; `mean` is its value at the means."""
    operands, names = _without_copies(operands, [list(each) for each in letters])
    uncertain = [i for i, x in enumerate(operands) if isinstance(x, Gaussian)]
    first: Any = operands[uncertain[0]]
    if not first.is_full:
        sets = [s for size in range(1, len(uncertain) + 1) for s in combinations(uncertain, size)]
        return Gaussian.diagonal(mean, _total([_single(operands, names, result, s) for s in sets]))
    if len(uncertain) == 1:
        at, values = uncertain[0], [mean_of(x) for x in operands]
        return first.mapped(mean, lambda t: _sum([*values[:at], t, *values[at + 1 :]], names, result))
    total = _total([_joint(operands, names, result, at) for at in uncertain])
    n = torch.Size(total.shape[1 : 1 + len(result)]).numel()
    return Gaussian.full(mean, total.reshape(total.shape[0], n, n))


def _total(terms: list[Tensor]) -> Tensor:
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


def _single(operands: Sequence[Value], names: list[Letters], result: Letters, chosen: tuple[int, ...]) -> Tensor:
    """`Σ G² Π v` for one set of operands."""
    tensors = [x.variance for i, x in enumerate(operands) if i in chosen and isinstance(x, Gaussian)]
    labels = [n for i, n in enumerate(names) if i in chosen]
    others = [mean_of(x) for i, x in enumerate(operands) if i not in chosen]
    if others:
        theirs = [n for i, n in enumerate(names) if i not in chosen]
        kept = {c for n in labels for c in n} | set(result)
        onto = sorted({c for n in theirs for c in n} & kept)
        tensors.append(_sum(others, theirs, onto).square())
        labels.append(onto)
    return _sum(tensors, labels, result)


def _joint(operands: Sequence[Value], names: list[Letters], result: Letters, at: int) -> Tensor:
    """One term of the covariance: `[batch, *result, *result again]`.

    Each letter has a twin for the other side of the covariance. The first letter of an operand with samples counts
    them, perhaps times something else: it becomes two letters, of which the one that counts samples has no twin. An
    operand without samples (a parameter) is the same for all of them.
    """
    runs = {i: x.covariance.shape[0] for i, x in enumerate(operands) if isinstance(x, Gaussian)}
    sampled = [i for i, batch in runs.items() if batch != 1]
    leading, batch = (names[sampled[0]][0], runs[sampled[0]]) if sampled else (None, 1)
    used = {c for n in names for c in n} | set(result)
    sample, shift = max(used) + 1, max(used) + 2 - min(used)

    def twin(letters: Letters) -> Letters:
        return [c + shift for c in letters]

    tensors: list[Tensor] = []
    labels: list[Letters] = []
    for i in (at, *(i for i in range(len(names)) if i != at)):  # the covariance first: cheapest from the left
        x, n = operands[i], names[i]
        if isinstance(x, Gaussian) and i <= at:
            front = [sample] if leading in n or leading is None else []
            shape = [size // max(batch, 1) if c == leading else size for size, c in zip(x.shape, n, strict=True)]
            matrix = x.covariance if i == at else _second_moment(x)
            tensors.append(matrix.reshape([batch] * len(front) + shape + shape))
            labels.append([*front, *n, *twin(n)])
        else:
            front = [sample] if leading in n else []
            value = _samples_first(mean_of(x), n, leading, batch)
            tensors += [value, value]
            labels += [front + n, front + twin(n)]
    return _sum(tensors, labels, [sample, *result, *twin(result)])


def _second_moment(x: Gaussian) -> Tensor:
    """`E[x xᵀ]` of each sample."""
    batch, n, _ = x.covariance.shape
    rows = x.mean.reshape(batch, n, 1)
    return x.covariance + rows * rows.mT


def _samples_first(t: Tensor, letters: Letters, leading: int | None, batch: Any) -> Tensor:
    """The dimension that counts samples split in two, the samples themselves in front."""
    if leading is None or leading not in letters:
        return t
    where = letters.index(leading)
    return t.unflatten(where, (batch, t.shape[where] // max(batch, 1))).movedim(where, 0)


def _sum(tensors: list[Tensor], names: list[Letters], result: Letters) -> Tensor:
    order = {c: ascii_letters[i] for i, c in enumerate(sorted({c for n in names for c in n} | set(result)))}
    words = ["".join(order[c] for c in n) for n in (*names, result)]
    equation = ",".join(words[:-1]) + "->" + words[-1]
    return in_full_precision(lambda *each: torch.einsum(equation, *each), *tensors)


@rule(aten.einsum.default, note="operands taken as independent: exact moments", linear_in=(1,))
def einsum(equation: str, operands: Sequence[Value], **kwargs: Any) -> Gaussian:
    values = [mean_of(x) for x in operands]
    names, result = _read(equation, values)
    return product(operands, names, result, aten.einsum(equation, values, **kwargs))


def _read(equation: str, values: list[Tensor]) -> tuple[list[Letters], Letters]:
    """The dimensions of each operand and of the result, `...` written out (as negative numbers, last one -1)."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    words = left.split(",")
    names = [_letters(w, v.dim() - len(w.replace("...", ""))) for w, v in zip(words, values, strict=True)]
    dots = -min([0, *(c for n in names for c in n)])
    if arrow:
        return names, _letters(right, dots)
    once = [c for c in sorted(set(left) - set(",.")) if left.count(c) == 1]
    return names, [*range(-dots, 0), *map(ord, once)]


def _letters(word: str, dots: int) -> Letters:
    before, ellipsis, after = word.partition("...")
    return [*map(ord, before), *(range(-dots, 0) if ellipsis else ()), *map(ord, after)]


def _without_copies(operands: Sequence[Value], names: list[Letters]) -> tuple[list[Value], list[Letters]]:
    """Dimensions of size 1 that stand for a longer one are left out: what is repeated is one random number."""
    long = {c for x, n in zip(operands, names, strict=True) for c, s in zip(n, x.shape, strict=True) if s != 1}
    squeezed, kept = [], []
    for x, n in zip(operands, names, strict=True):
        drop = [d for d, (c, s) in enumerate(zip(n, x.shape, strict=True)) if s == 1 and c in long]
        shape = [s for d, s in enumerate(x.shape) if d not in drop]
        squeezed.append(reshaped(x, shape) if drop else x)
        kept.append([c for d, c in enumerate(n) if d not in drop])
    return squeezed, kept


def sum_of(mean: Tensor, parts: list[Gaussian]) -> Gaussian:
    """The sum of independent parts that broadcast to `mean`; one without samples is the same for every sample."""
    sampled = any(p.samples != 1 for p in parts)
    shared = [sampled and p.samples == 1 for p in parts]
    wide = [p.expanded(mean.shape) if s else stretched(p, mean.shape) for p, s in zip(parts, shared, strict=True)]
    return independent_sum(mean, wide)


def reshaped(x: Value, shape: Sequence[Any]) -> Value:
    return x.reshape(shape) if isinstance(x, Tensor) else x.reshaped(shape)
