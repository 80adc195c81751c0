"""What a predictor needs beside its program, as JSON: its likelihood and numbers, its inputs, and its plan.

Reading looks at every value before it is used: each has one type, numbers are finite and sizes are not negative.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from propagauss.errors import InputError
from propagauss.network.plan import Plan, Step
from propagauss.network.streamlined import Slot, Streamlined
from propagauss.predictive.archive.refused import Refused

VERSION = 1
DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}
NAME = re.compile(r"\w{1,200}")
MOST = 1 << 62
DEPTH = 16  # of inputs in inputs


@dataclass(frozen=True)
class State:
    """A predictor without its program."""

    predictor: str
    likelihood: str
    numbers: dict[str, Any]  # fields of the likelihood
    scale: float
    slots: list[Slot]
    form: tuple[tuple[Any, ...], dict[str, Any]]  # of a call, with the number of its slot in the place of each input
    at_once: int | None
    plan: Plan


# -- writing


def described(net: Streamlined, sizes: list[tuple[int | None, ...]], own: Mapping[str, Any]) -> str:
    """As JSON; `sizes` are those that the program takes, by tensor, and `own` is what the predictor says of itself."""
    counts = iter(sizes)
    slots = []
    for slot in net.slots:
        fits = () if slot.literal else next(counts)
        if slot.uncertain:
            next(counts)
        slots.append(_slot(slot, fits))
    args, kwargs = net.form
    plan = {**vars(net.plan), "steps": [list(asdict(step).values()) for step in net.plan]}
    numbers = {name: _number(name, value) for name, value in own["numbers"].items()}
    rest = {"args": _form(args), "kwargs": _form(kwargs), "slots": slots, "at_once": net.at_once, "plan": plan}
    return json.dumps({"version": VERSION} | dict(own) | {"numbers": numbers} | rest)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": value.detach().cpu().double().tolist()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"the predictor cannot be saved: '{name}' of its likelihood is a {type(value).__name__}")


def _slot(slot: Slot, sizes: tuple[int | None, ...]) -> dict[str, Any]:
    if slot.literal:
        if not (slot.value is None or isinstance(slot.value, bool | int | float | str)):
            raise InputError(
                f"the predictor cannot be saved: its input '{slot.name}' is a {type(slot.value).__name__}, which is "
                "built in: streamline without it"
            )
        return {"name": slot.name, "literal": True, "value": slot.value}
    own = {"name": slot.name, "uncertain": slot.uncertain, "dtype": str(slot.dtype).removeprefix("torch.")}
    return own | {"sizes": sizes, "example": slot.example}


def _form(value: Any) -> Any:
    """Inputs in inputs: tuples, lists and dictionaries by their names, so that each comes back as what it was."""
    if isinstance(value, int):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [_form(each) for each in value]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: _form(each) for name, each in value.items()}}
    raise InputError(f"the predictor cannot be saved: its inputs are held by a {type(value).__name__}")


# -- reading


def read(text: str) -> State:
    """Refused if anything is missing, of another type, or unknown."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"what it says of the predictor is not JSON ({str(error)[:100]})") from error
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise Refused("what it says of the predictor is of another version")
    names = ("predictor", "likelihood", "numbers", "scale", "args", "kwargs", "slots", "at_once", "plan")
    entries = _entries(found, {*names, "version"}, "the predictor")
    slots = [_read_slot(each) for each in _list(entries["slots"], "slots")]
    args, kwargs = _read_form(entries["args"]), _read_form(entries["kwargs"])
    if not isinstance(args, tuple) or not isinstance(kwargs, dict) or _leaves((args, kwargs)) != [*range(len(slots))]:
        raise Refused("its inputs are not those that it names")
    at_once = entries["at_once"]
    return State(
        predictor=_text(entries["predictor"], "the predictor"),
        likelihood=_text(entries["likelihood"], "the likelihood"),
        numbers={_name(k): _read_number(k, v) for k, v in _dict(entries["numbers"], "numbers").items()},
        scale=_float(entries["scale"], "the scale", lambda v: v > 0),
        slots=slots,
        form=(args, kwargs),
        at_once=None if at_once is None else _whole(at_once, "the number of samples", 1),
        plan=_read_plan(entries["plan"]),
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _entries(value: Any, names: set[str], what: str) -> dict[str, Any]:
    """A dictionary with just these names."""
    found = _dict(value, what)
    if set(found) != names:
        odd = sorted(set(found) ^ names)[0]
        raise Refused(f"what it says of {what} {'lacks' if odd in names else 'has an unknown part,'} {odd[:60]!r}")
    return found


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{what} is {str(value)[:60]!r}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"{what} is {str(value)[:60]!r}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > 10_000:
        raise Refused(f"{what} is {str(value)[:60]!r}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Refused(f"it has the name {str(value)[:60]!r}")
    return value


def _float(value: Any, what: str, good: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise Refused(f"{what} is {str(value)[:60]!r}")
    if not math.isfinite(value) or not good(float(value)):
        raise Refused(f"{what} is {str(value)[:60]!r}")
    return float(value)


def _whole(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MOST:
        raise Refused(f"{what} is {str(value)[:60]!r}")
    return value


def _flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise Refused(f"{what} is {str(value)[:60]!r}")
    return value


def _literal(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and abs(value) < MOST:
        return value
    raise Refused(f"{what} is {str(value)[:60]!r}")


def _read_number(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return _literal(value, f"'{name}' of its likelihood")
    stored = _entries(value, {"tensor"}, f"'{name}' of its likelihood")["tensor"]
    one = not isinstance(stored, list)
    what = f"'{name}' of its likelihood"
    numbers = [_float(each, what, lambda v: v >= 0) for each in ([stored] if one else stored)]
    return torch.tensor(numbers[0] if one else numbers, dtype=torch.float64)


def _read_slot(value: Any) -> Slot:
    if _dict(value, "an input").get("literal"):
        found = _entries(value, {"name", "literal", "value"}, "an input")
        _flag(found["literal"], "an input")
        return Slot(_text(found["name"], "an input"), literal=True, value=_literal(found["value"], "an input"))
    found = _entries(value, {"name", "uncertain", "dtype", "sizes", "example"}, "an input")
    name = _text(found["name"], "the name of an input")
    if not isinstance(found["dtype"], str) or found["dtype"] not in DTYPES:
        raise Refused(f"the type of input {name[:60]!r} is {str(found['dtype'])[:60]!r}")
    sizes = tuple(None if n is None else _whole(n, "a size") for n in _list(found["sizes"], "sizes"))
    example = tuple(_whole(n, "a size") for n in _list(found["example"], "sizes"))
    if len(sizes) != len(example):
        raise Refused(f"the sizes of input {name[:60]!r} are malformed")
    uncertain = _flag(found["uncertain"], "an input")
    return Slot(name, uncertain=uncertain, dtype=DTYPES[found["dtype"]], sizes=sizes, example=example)


def _read_form(value: Any, depth: int = 0) -> Any:
    if type(value) is int:
        return value
    if depth > DEPTH or not isinstance(value, dict) or len(value) != 1:
        raise Refused("how its inputs are nested is malformed")
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {_text(name, "an input"): _read_form(v, depth + 1) for name, v in _dict(inner, "inputs").items()}
    parts = [_read_form(each, depth + 1) for each in _list(inner, "inputs")]
    if kind not in ("tuple", "list"):
        raise Refused(f"its inputs are held by {kind[:60]!r}")
    return tuple(parts) if kind == "tuple" else parts


def _leaves(form: Any) -> list[int]:
    """In the order in which calls are flattened: names sorted at the top, else as they stand."""
    if isinstance(form, int):
        return [form]
    inner = form.values() if isinstance(form, dict) else form
    return [leaf for each in inner for leaf in _leaves(each)]


def _read_plan(value: Any) -> Plan:
    found = _entries(value, {field.name for field in fields(Plan)}, "the plan")
    texts = {
        name: tuple(_text(each, "the plan") for each in _list(found[name], "the plan"))
        for name in ("parameters", "notes")
    }
    steps = tuple(_read_step(each) for each in _list(found["steps"], "the plan"))
    return Plan(steps, _whole(found["untouched"], "the plan"), **texts)


def _read_step(value: Any) -> Step:
    if len(_list(value, "the plan")) != len(fields(Step)):
        raise Refused("a step of the plan is malformed")
    op, path, rule, structure, shape, note = value
    sizes = tuple(n if isinstance(n, str) else _whole(n, "the plan") for n in _list(shape, "the plan"))
    texts = [_text(each, "the plan") for each in (op, path, rule, structure)]
    return Step(*texts, shape=sizes, note=_text(note, "the plan"))
