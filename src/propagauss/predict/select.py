"""Which columns of the data make the inputs of the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from propagauss.errors import InputError, nearest
from propagauss.predict.models.model import Input, Model, describe, fit
from propagauss.predict.reading.data import reader
from propagauss.predict.reading.rows import Columns

SHOWN = 12
Names = Sequence[str] | Mapping[str, Sequence[str]]


class Selection(NamedTuple):
    """What is read, the shape it takes for each input of the model, and the type of the id."""

    columns: Columns
    shapes: tuple[tuple[int, ...], ...]
    id_type: pa.DataType | None


class Table(NamedTuple):
    """A file that shows what the columns hold."""

    path: Path
    kinds: dict[str, str]

    def shape(self, columns: Sequence[str]) -> tuple[int, ...]:
        """Of a row of these."""
        if columns and self.kinds[columns[0]] == "number":
            return (len(columns),)
        return reader(self.path).shape(self.path, columns[0] if columns else None)


def select(model: Model, paths: list[Path], names: Names | None, id: str | None) -> Selection:
    """Find the columns, in every file; complain before anything is read."""
    path = next((path for path in paths if reader(path).estimate(path)), paths[0])  # rows show what columns hold
    table = Table(path, reader(path).kinds(path))
    copied = [] if id is None else [id]
    if not table.kinds and (names or copied):
        raise InputError(f"{path.name} is an array, without columns: leave --columns and --id out")
    _check(path, table.kinds, copied)
    groups = _named(model, table, names, id) if names else _found(model, table, id)
    shapes = tuple(_shape(model, each, table, group) for each, group in zip(model.inputs, groups, strict=True))
    chosen = [name for group in groups for name in group]
    for other in paths:
        if other != path:
            _same(other, table, chosen, copied)
    floats = all(each.dtype.kind == "f" for each in model.inputs)
    dtype = np.result_type(*(each.dtype for each in model.inputs)) if floats else np.dtype(np.float64)  # shows NaN
    widths = [_widths(group, table, shape) for group, shape in zip(groups, shapes, strict=True)]
    columns = Columns(tuple(chosen), tuple(w for group in widths for w in group), id, dtype)
    return Selection(columns, shapes, _id_type(path, id))


def _widths(group: Sequence[str], table: Table, shape: tuple[int, ...]) -> list[int]:
    numbers = group and table.kinds[group[0]] == "number"
    return [1] * len(group) if numbers else [math.prod(shape)]


def _same(other: Path, table: Table, chosen: Sequence[str], copied: Sequence[str]) -> None:
    """What is read of one file can be read of another."""
    kinds = reader(other).kinds(other)
    _check(other, kinds, [*chosen, *copied])
    _check_numbers(other, kinds, chosen)
    if not kinds and reader(other).shape(other, None) != table.shape([]):
        shapes = f"{describe(table.shape([]))} in {table.path.name}, {describe(reader(other).shape(other, None))}"
        raise InputError(f"the samples are of shape {shapes} in {other.name}: they must be the same in all files")
    lists = [name for name in chosen if (kinds[name] == "list") != (table.kinds[name] == "list")]
    if lists:
        raise InputError(f"column '{lists[0]}' holds lists in {other.name} or {table.path.name}, but not in both")


def _check(path: Path, kinds: dict[str, str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in kinds]
    if missing and kinds:
        hint = nearest(missing[0], kinds) if len(missing) == 1 else ""
        there = f"there are {listed(list(kinds))}"
        named = "; INPUT=A,B is for models of several inputs" if any("=" in name for name in missing) else ""
        raise InputError(f"{path.name} has no column {listed(missing)}{hint} ({there}){named}")
    _check_twice(path, [name for name in wanted if kinds.get(name) == "twice"])


def _check_twice(path: Path, twice: list[str]) -> None:
    if twice:
        raise InputError(f"{path.name} has more than one column named {listed(twice)}: rename them")


def _check_numbers(path: Path, kinds: dict[str, str], chosen: Sequence[str]) -> None:
    wrong = [name for name in chosen if kinds[name] == "other"]
    if wrong:
        remedy = "leave it out, or encode it as in training"
        raise InputError(f"column {listed(wrong)} of {path.name} does not hold numbers: {remedy}")


def _named(model: Model, table: Table, names: Names, id: str | None) -> list[list[str]]:
    """As the user says, for each input."""
    groups = _grouped(model, names)
    flat = [name for group in groups for name in group]
    _check(table.path, table.kinds, flat)
    _check_numbers(table.path, table.kinds, flat)
    twice = [name for i, name in enumerate(flat) if name in flat[:i]]
    if twice:
        raise InputError(f"column {listed(twice)} is named more than once")
    if id in flat:
        raise InputError(f"column '{id}' cannot be both the id and an input")
    if any(len(group) > 1 and any(table.kinds[name] == "list" for name in group) for group in groups):
        raise InputError("a column of lists is a whole input: name it alone, or only columns of numbers")
    return groups


def _grouped(model: Model, names: Names) -> list[list[str]]:
    """`["x=a", "b", "mask=c"]` or `{"x": ["a", "b"], "mask": ["c"]}`, in the order of the model's inputs."""
    known = [each.name for each in model.inputs]
    groups: dict[str, list[str]] = {}
    if isinstance(names, Mapping):
        groups = {name: list(columns) for name, columns in names.items()}
    else:
        name = known[0] if len(known) == 1 else None
        for token in names:
            before, sign, after = token.partition("=")
            name = before if sign and before in known else name
            if name is None:
                takes = f"{model.name} takes {listed(known)}"
                raise InputError(f"{takes}: say which of them '{token}' is {_example(known)}")
            groups.setdefault(name, []).append(after if sign and before in known else token)
    if set(groups) != set(known) or not all(groups.values()):
        raise InputError(
            f"{model.name} takes {listed(known)}, but there are columns for {listed(list(groups))} {_example(known)}"
        )
    return [groups[name] for name in known]


def _example(known: Sequence[str]) -> str:
    return f"(--columns {','.join(f'{name}=A,B' for name in known[:2])})"


def _found(model: Model, table: Table, id: str | None) -> list[list[str]]:
    """As the columns suggest."""
    _check_twice(table.path, [name for name, kind in table.kinds.items() if kind == "twice"])
    if len(model.inputs) > 1:
        return [_of_name(model, each, table) for each in model.inputs]
    return [_fitting(model, table, id)]


def _of_name(model: Model, wanted: Input, table: Table) -> list[str]:
    """For one of several inputs: the column of its name, or `x_0`, `x_1`, ... for input `x`."""
    if not table.kinds:
        names = listed([each.name for each in model.inputs])
        raise InputError(f"{model.name} takes {names}, but {table.path.name} is one array: give a table with columns")
    names = (f"{wanted.name}_{i}" for i in itertools.count())
    numbered = list(itertools.takewhile(lambda name: name in table.kinds, names))
    for names in ([wanted.name], numbered):
        if names and all(name in table.kinds for name in names):
            _check_numbers(table.path, table.kinds, names)
            return names
    raise InputError(
        f"{table.path.name} has no column '{wanted.name}' for this input of {model.name} (there are "
        f"{listed(list(table.kinds))}): name columns for each {_example([each.name for each in model.inputs])}"
    )


def _fitting(model: Model, table: Table, id: str | None) -> list[str]:
    """All columns of numbers, or the one of lists: whichever the model takes."""
    if not table.kinds:
        return []
    numbers = [name for name, kind in table.kinds.items() if kind == "number" and name != id]
    lists = [name for name, kind in table.kinds.items() if kind == "list" and name != id]
    candidates = [numbers] * bool(numbers) + [[name] for name in lists]
    if not candidates:
        comma = ": columns are separated by commas" if any(set(name) & set(";\t|") for name in table.kinds) else ""
        raise InputError(f"{table.path.name} has no columns of numbers (there are {listed(list(table.kinds))}){comma}")
    if len(candidates) == 1:
        return candidates[0]
    fits = [each for each in candidates if fit(table.shape(each), model.inputs[0].shape)]
    if len(fits) == 1:
        return fits[0]
    raise InputError(
        f"{table.path.name} has {len(numbers)} columns of numbers and lists in {listed(lists)}; {model.name} takes "
        f"{describe(model.inputs[0].shape)}: say which with --columns"
    )


def _shape(model: Model, wanted: Input, table: Table, chosen: list[str]) -> tuple[int, ...]:
    raw = table.shape(chosen)
    shape = fit(raw, wanted.shape)
    if shape is not None:
        return shape
    what = f" '{wanted.name}'" if len(model.inputs) > 1 else ""
    takes = f"{model.name} takes an input{what} of shape {describe(wanted.shape)}"
    if chosen and table.kinds[chosen[0]] == "number":
        n = len(chosen)
        has = f"{n} column{'s' if n > 1 else ''} of numbers were chosen: {listed(chosen)}"
        others = [name for name, kind in table.kinds.items() if kind != "number"]
        missing = n + len(others) == len(table.kinds) and n < math.prod(size or 1 for size in wanted.shape)
        left = f" (in {listed(others)} not all values are numbers)" if others and missing else ""
        raise InputError(f"{takes}, but {has}{left}; use --columns")
    has = f"column '{chosen[0]}' has lists" if chosen else "has samples"
    raise InputError(f"{takes}, but {table.path.name} {has} of shape {describe(raw)}")


def _id_type(path: Path, id: str | None) -> pa.DataType | None:
    if id is None:
        return None
    found = reader(path).id_type(path, id)
    if pa.types.is_nested(found):
        raise InputError(f"column '{id}' holds {found}, which cannot be an id")
    return found


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + more
