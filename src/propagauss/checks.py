"""What callers give, checked in one way: each function returns the value in one form, or says what is wrong with it.

Every message names the thing, what it is, and what to give instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from propagauss.errors import InputError, PropagaussError

Error = type[PropagaussError]


def kind(value: Any) -> str:
    """What a value is, in a few words: `None`, `'abc'`, `a list of 2`, `a tensor of shape (4, 3)`."""
    if isinstance(value, Tensor) and not value.is_nested:
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {value.shape}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (tuple, list, dict, set)):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex, np.generic, os.PathLike)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


# -- tensors


def tensor(value: Any, what: str, error: Error = InputError, sparse: bool = False) -> Tensor:
    """A tensor whose values every op can read."""
    if not isinstance(value, Tensor):
        array = isinstance(value, (np.ndarray, list, tuple, int, float, np.generic))
        remedy = ": make it one with torch.as_tensor" if array and not isinstance(value, bool) else ""
        raise error(f"{what} is {kind(value)}; a tensor is needed{remedy}")
    trouble = _trouble(value, sparse)
    if trouble:
        raise error(f"{what} is {trouble}")
    return value


def floating(value: Any, what: str, error: Error = InputError) -> Tensor:
    """A tensor of real floating-point numbers with which one can compute."""
    t = tensor(value, what, error)
    if t.is_complex():
        raise error(f"{what} is {t.dtype}; real numbers are needed: give its .real, or torch.view_as_real of it")
    if not t.is_floating_point() or t.dtype.itemsize < 2:
        raise error(f"{what} is {t.dtype}; floating-point numbers are needed: convert it with .float()")
    return t


def from_numpy(array: np.ndarray) -> Tensor:
    """The same numbers, however they lie in memory; those that are masked are no numbers."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.getmaskarray(array).any():
        raise InputError("the array is masked, and the values behind the mask mean nothing: fill or remove them")
    try:
        return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape))
    except TypeError as error:
        raise InputError(f"this is an array of {array.dtype}; numbers are needed") from error


def _trouble(t: Tensor, sparse: bool) -> str:
    """Why the values of a tensor cannot be read by every op, and what to do; nothing if they can."""
    if t.is_nested:
        return "a nested tensor: pad it with torch.nested.to_padded_tensor(x, 0.0), or give one sample at a time"
    if t.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return "an MKL-DNN tensor: convert it with .to_dense()"
    if t.layout != torch.strided and not sparse:
        return f"a sparse tensor ({t.layout}): convert it with .to_dense()"
    if t.is_quantized:
        return f"a quantised tensor ({t.dtype}): convert it with .dequantize()"
    if t.is_meta:
        return "on the meta device, so it has a shape and no values: load or make it on a real device"
    return ""


def moved(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`t.to(...)`, to another device or another floating-point type."""
    try:
        new = t.to(*args, **kwargs)
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"cannot convert with to({given}): {reason}; give a device, or a dtype such as torch.float64"
        ) from error
    return floating(new, "the result of to()")


# -- numbers


def number(
    value: Any,
    what: str,
    need: str = "a number",
    good: Callable[[float], bool] = lambda v: True,
    error: Error = InputError,
) -> float:
    """A finite number for which `good` holds; NumPy's and tensors without dimensions are numbers, too."""
    plain = _unboxed(value)
    if not isinstance(plain, (int, float)) or isinstance(plain, bool):
        raise error(f"{what} is {kind(value)}; it must be {need}")
    try:
        found = float(plain)
    except OverflowError:
        found = math.inf
    if not (math.isfinite(found) and good(found)):
        raise error(f"{what} is {kind(plain)}; it must be {need}")
    return found


def positive(value: Any, what: str, error: Error = InputError) -> float:
    return number(value, what, "a positive number", lambda v: v > 0, error)


def whole(value: Any, what: str, least: int = 0, most: int | None = None, error: Error = InputError) -> int:
    """A whole number from `least` to `most`; 3.0 is none."""
    plain = _unboxed(value)
    bound = "" if most is None else f" and at most {most:,}"
    need = f"{what} is {kind(value)}; it must be a whole number of at least {least}{bound}"
    if not isinstance(plain, int) or isinstance(plain, bool):
        raise error(need)
    if plain < least or (most is not None and plain > most):
        raise error(need)
    return plain


def seed(value: Any, what: str = "seed") -> int:
    return whole(value, what, 0, 2**63 - 1)


def generator(value: Any, error: Error = InputError) -> torch.Generator | None:
    if value is not None and not isinstance(value, torch.Generator):
        raise error(f"generator is {kind(value)}; give torch.Generator().manual_seed(0), or None")
    return value


def _unboxed(value: Any) -> Any:
    """The number in a NumPy scalar, or in a tensor or array without dimensions."""
    if isinstance(value, Tensor):
        plain = not (value.is_nested or value.is_meta or value.is_quantized) and value.layout == torch.strided
        return value.item() if plain and value.dim() == 0 else value
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        return value.item()
    return value


# -- words


def choice(value: Any, what: str, allowed: Iterable[str], error: Error = InputError) -> str:
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        *others, last = map(repr, allowed)
        raise error(f"{what} is {kind(value)}; it must be {', '.join(others)} or {last}")
    return value


def flag(value: Any, what: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{what} is {kind(value)}; it must be True or False")
    return bool(value)


def patterns(given: Iterable[Any], what: str, example: str, error: Error = InputError) -> tuple[str, ...]:
    """Names or glob patterns, or lists of them."""
    found: list[Any] = []
    for each in given:
        alone = isinstance(each, (str, bytes, Tensor)) or not isinstance(each, Iterable)
        found += [each] if alone else each
    odd = [each for each in found if not isinstance(each, str)]
    if odd:
        raise error(f"{what} holds {kind(odd[0])}; names or patterns of parameters are needed, such as {example!r}")
    if not found:
        raise error(f"{what} is an empty list, so it names no parameter: give names or patterns, such as {example!r}")
    return tuple(found)


def named(value: Any, what: str, example: str, error: Error = InputError) -> Mapping[str, Any]:
    """A mapping from names of parameters."""
    if not isinstance(value, Mapping):
        raise error(f"{what} are {kind(value)}; a dictionary by names of parameters is needed, such as {example}")
    odd = [name for name in value if not isinstance(name, str)]
    if odd:
        raise error(f"{what} have the name {kind(odd[0])}; names of parameters are texts, as in named_parameters()")
    return value


def path(value: Any, what: str, error: Error = InputError) -> Path:
    """A name of a file."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise error(f"{what} is {kind(value)}; the name of a file is needed, as a text or a Path")
    text = os.fspath(value)
    if not text or "\0" in text:
        raise error(f"{what} is {text!r}, which is no name of a file")
    return Path(text)


def new_file(value: Any, what: str, error: Error = InputError) -> Path:
    """A name under which a file can be written."""
    target = path(value, what, error)
    if os.path.isdir(target):  # False for a name that is too long, at which Path.is_dir raises
        raise error(f"{target} is a folder: give the name of a file in it")
    if not os.path.isdir(target.parent):
        raise error(f"there is no folder {target.parent}: make it first, with Path({str(target.parent)!r}).mkdir()")
    return target


@contextmanager
def written(target: Path, error: Error = InputError) -> Iterator[None]:
    """What the system says against writing a file."""
    try:
        yield
    except OSError as reason:
        raise error(f"cannot write {target}: {reason.strerror or reason}") from reason
