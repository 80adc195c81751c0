"""What a loader yields, as inputs and targets: pairs, several inputs in a row, dictionaries with labels.

Which inputs a model takes is read from its signature, and those of a network from the example it was made with. What
else a batch holds is left out, with one warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset
from tqdm import tqdm

from propagauss.checks import kind, tensor
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian

LABELS = ("labels", "label")  # as Hugging Face calls them


# -- which inputs are taken


@dataclass(frozen=True)
class Takes:
    """The inputs of a model or network, as far as one can tell."""

    form: str = "any inputs"  # what a user has to give
    who: str = "the model"
    names: frozenset[str] | None = None  # of inputs given by name; None if any will do
    most: int | None = None  # inputs given in a row; None if any number will do
    further: bool = True  # whether other names are taken as well
    exact: bool = False  # whether there must be as many, and these names


def taken_by(net: Any) -> Takes:
    """What a network, a model, or a baseline around one takes."""
    own = getattr(net, "takes", None)
    if isinstance(own, Takes):
        return own
    module = net if isinstance(net, nn.Module) else getattr(net, "model", None)
    return _signature(module) if isinstance(module, nn.Module) else Takes()


def _signature(model: nn.Module) -> Takes:
    """From the names of `forward`; where only `**inputs` stands, any will do, as in a wrapper."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python
        return Takes()
    shown = [p.name for p in parameters if p.name not in LABELS]
    in_a_row = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - set(LABELS)
    kinds = {p.kind for p in parameters}
    further, any_number = inspect.Parameter.VAR_KEYWORD in kinds, inspect.Parameter.VAR_POSITIONAL in kinds
    known = None if further and not names else frozenset(names)
    form = f"forward({', '.join(shown)})"
    return Takes(form, names=known, most=None if any_number else len(in_a_row), further=further)


# -- batches of training and held-out data


def batches(
    loader: Iterable[Any],
    takes: Takes,
    device: torch.device | None = None,
    progress: str | None = None,
    empty: bool = False,
) -> Iterator[tuple[Any, Tensor]]:
    """Inputs and targets of every batch, the inputs on `device`; `progress` titles a bar, shown on terminals only.

    A batch is `(x, y)`, where `x` is a tensor, a tuple or a dictionary; `(x1, x2, y)`; or a dictionary with `labels`.
    Unless `empty`, there must be data.
    """
    seen, told = False, False
    for number, batch in enumerate(_bar(_iterable(loader), progress)):
        x, y, left = _pair(batch, takes, f"batch {number}")
        told = told or _tell(left, takes)
        seen = seen or y.shape[0] > 0
        yield _moved(x, device), y
    if not (seen or empty):
        raise InputError("the loader is empty: it yielded no data (a generator can be read only once)")


def _bar(things: Iterable[Any], title: str | None) -> Iterable[Any]:
    return tqdm(things, desc=title, leave=False, disable=None if title else True)


def _moved(x: Any, device: torch.device | None) -> Any:
    if device is None:
        return x
    return pytree.tree_map_only((Tensor, Gaussian), lambda t: t.to(device), x, is_leaf=_is_gaussian)


def _is_gaussian(x: Any) -> bool:
    return isinstance(x, Gaussian)


def _iterable(loader: Any) -> Iterable[Any]:
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InputError(
            f"the loader is a dataset ({type(loader).__name__}), which has no batches: give "
            "DataLoader(dataset, batch_size=256)"
        )
    if hasattr(loader, "to_numpy"):
        raise InputError(f"the data are {kind(loader)}: give its .to_numpy(), or tensors made of it in a DataLoader")
    single = isinstance(loader, (str, bytes, Mapping, Tensor, np.ndarray))
    if single or isinstance(loader, type) or (not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__")):
        raise InputError(
            f"the loader is {kind(loader)}; something that yields pairs (x, y) is needed: a DataLoader, or a list such "
            "as [(x, y)]"
        )
    return loader


def _pair(batch: Any, takes: Takes, where: str) -> tuple[Any, Tensor, set[str]]:
    """Inputs, targets, and the names of what was left out."""
    if isinstance(batch, Mapping):
        return _labelled(dict(batch), takes, where)
    several = isinstance(batch, (tuple, list)) and len(batch) >= 2 and not isinstance(batch[-1], (str, Mapping))
    if not several or (len(batch) > 2 and takes.most is not None and len(batch) - 1 > takes.most):
        remedy = "; give [(x, y)] for a single batch" if isinstance(batch, Tensor) else ""
        if several:
            remedy = f"; {takes.who} takes {takes.form}, and the last entry of a batch is y"
        raise InputError(
            f"{where}: the loader yields {kind(batch)}; it must yield (x, y): pairs with y a tensor, and x a tensor, "
            f"or a tuple or dict of inputs{remedy}"
        )
    entries: list[Any] = list(batch)
    *x, y = entries
    inputs, left = _known(x[0] if len(x) == 1 else tuple(x), takes, explicit=True)
    _check_inputs(inputs, where)
    return inputs, _target(y, f"{where}: y of the pair (x, y)"), left


def _labelled(batch: dict[Any, Any], takes: Takes, where: str) -> tuple[Any, Tensor, set[str]]:
    """Of a dictionary of inputs, among which the labels are."""
    key = next((name for name in LABELS if name in batch), None)
    if key is None:
        raise InputError(
            f"{where}: the loader yields {kind(batch)} without 'labels' ({_listed(batch)}): add the targets under that "
            "name, or yield (inputs, labels)"
        )
    y = _target(batch[key], f"{where}: '{key}'")
    inputs, left = _known(_unlabelled(batch, takes), takes, explicit=False)
    _check_inputs(inputs, where)
    return inputs, y, left


def _unlabelled(batch: dict[Any, Any], takes: Takes) -> dict[Any, Any]:
    """Labels stay only in front of a network that was made with them."""
    kept = takes.names if takes.exact else None
    return {name: value for name, value in batch.items() if name not in LABELS or name in (kept or ())}


def _known(x: Any, takes: Takes, explicit: bool) -> tuple[Any, set[str]]:
    """Of named inputs those that are taken, and what is left; `explicit` if they stand apart from the targets."""
    if not isinstance(x, Mapping):
        return x, set()
    inputs = dict(x)
    if takes.names is None or (explicit and takes.further):
        return inputs, set()
    kept = {name: value for name, value in inputs.items() if name in takes.names}
    if not kept:
        raise InputError(
            f"{takes.who} takes {takes.form}, but the batches of the loader hold {_listed(inputs)}: "
            + ("give such a dictionary as the example" if takes.exact else "name the inputs as forward() does")
        )
    return kept, {str(name) for name in inputs} - {str(name) for name in kept}


def _tell(left: set[str], takes: Takes) -> bool:
    if left:
        names = ", ".join(sorted(left))
        text = f"the loader also yields {names}, which {takes.who} does not take ({takes.form}): left out"
        warnings.warn(text, stacklevel=3)
    return bool(left)


def _target(y: Any, what: str) -> Tensor:
    y = tensor(y, what)
    if y.dim() == 0:
        raise InputError(f"{what} has no batch dimension: give targets [B] or [B, ...]")
    return y


def _check_inputs(x: Any, where: str) -> None:
    if isinstance(x, Mapping):
        for name, value in x.items():
            if isinstance(value, (list, tuple)) and not any(isinstance(v, Tensor) for v in pytree.tree_leaves(value)):
                raise InputError(
                    f"{where}: '{name}' is {kind(value)}; a tensor is needed: torch.as_tensor makes one, and a "
                    "tokeniser does with return_tensors='pt'"
                )
    for leaf in pytree.tree_leaves(x, is_leaf=_is_gaussian):
        if isinstance(leaf, (Tensor, np.ndarray)) or (leaf is x and not _is_gaussian(x)):
            tensor(leaf, f"{where}: x of the pair (x, y)")


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "nothing"


# -- batches of inputs alone


def input_batches(
    data: Any,
    takes: Takes,
    device: torch.device | None = None,
    progress: str | None = None,
    rows: int = 256,
) -> Iterator[Any]:
    """Inputs of every batch of a loader, whether or not it has targets; or of all the data at once, `rows` at a time.

    All the data at once are a tensor, a Gaussian, a dictionary of tensors, or a tuple of the several that a network
    takes.
    """
    seen, told = False, False
    for number, batch in enumerate(_bar(_in_rows(data, takes, rows), progress)):
        seen = True
        x, left = _known(_inputs(batch, takes, f"batch {number}"), takes, explicit=not isinstance(batch, Mapping))
        told = told or _tell(left, takes)
        _check_inputs(x, f"batch {number}")
        yield _moved(x, device)
    if not seen:
        raise InputError("there are no data: the loader is empty (a generator can be read only once)")


def _in_rows(data: Any, takes: Takes, rows: int) -> Iterable[Any]:
    """A loader as it is, and everything at once as a list of its parts."""
    several = isinstance(data, tuple) and takes.exact and 1 < len(data) == takes.most
    if isinstance(data, Mapping):
        data = _unlabelled(dict(data), takes)
    elif not isinstance(data, (Tensor, Gaussian)) and not (several and all(isinstance(t, Tensor) for t in data)):
        return _iterable(data)
    leaves = [t for t in pytree.tree_leaves(data) if isinstance(t, Tensor) and t.dim()]
    if not leaves:
        raise InputError(f"the data are {kind(data)}, which hold no tensor with a batch dimension: give [N, ...]")
    count = len(leaves[0])
    if any(len(t) != count for t in leaves):
        raise InputError(f"the inputs have {' and '.join(str(len(t)) for t in leaves)} rows: they must have as many")
    parts = [slice(start, start + rows) for start in range(0, count, rows)]

    def part(which: slice) -> Any:
        return pytree.tree_map(lambda t: t[which] if isinstance(t, Tensor) and t.dim() else t, data)

    return [part(which) for which in parts]


def _inputs(batch: Any, takes: Takes, where: str) -> Any:
    """A batch without its targets. In a row, these are what comes after as many inputs as the network takes."""
    if isinstance(batch, Mapping):
        return _unlabelled(dict(batch), takes)
    if not isinstance(batch, (tuple, list)):
        return batch
    entries: list[Any] = list(batch)
    if not entries:
        raise InputError(f"{where} is empty: yield x, or (x, y)")
    nested = isinstance(entries[0], (tuple, list, Mapping))
    inputs = 1 if nested or len(batch) < 3 else len(batch) - 1
    if not nested and takes.exact and takes.most:
        inputs = takes.most
    if len(batch) not in (inputs, inputs + 1):
        raise InputError(
            f"{where}: the loader yields {kind(batch)}; {takes.who} takes {takes.form}: yield these, with or without "
            "the targets after them"
        )
    return entries[0] if inputs == 1 else tuple(entries[:inputs])
