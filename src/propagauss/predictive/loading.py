"""`propagauss.load`: a predictor from a file that `Predictor.save` wrote."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from torch.export import ExportedProgram

from propagauss.alone import quiet
from propagauss.checks import path as checked_path
from propagauss.errors import InputError, PropagaussError
from propagauss.likelihoods import LIKELIHOODS, Likelihood
from propagauss.network.saved import Saved, is_latent
from propagauss.predictive import archive
from propagauss.predictive.archive import Refused, State
from propagauss.predictive.binary import BinaryClassifier
from propagauss.predictive.classifier import Classifier
from propagauss.predictive.export import sizes_of
from propagauss.predictive.heteroscedastic import HeteroscedasticRegressor
from propagauss.predictive.predictor import Predictor
from propagauss.predictive.regressor import Regressor

DOORS: dict[str, type[Predictor]] = {  # by likelihood
    "classification": Classifier,
    "binary": BinaryClassifier,
    "regression": Regressor,
    "heteroscedastic": HeteroscedasticRegressor,
}


def load(path: str | os.PathLike[str]) -> Predictor:
    """The predictor in a file that `predictor.save` wrote: a `Classifier`, a `Regressor` or what else it was.

    The class of the model is not needed, and nothing in the file is executed: see Security in the documentation. The
    predictor predicts, decomposes, calibrates, exports and saves as the one that was saved. Its network is on the CPU,
    in the precision that it was saved in, and stays there.
    """
    target = checked_path(path, "the path to load from")
    if not target.is_file():
        raise InputError(f"there is no file {target}" if not target.exists() else f"{target} is not a file")
    file = archive.opened(target)
    state = state_of(target, file.details)  # before PyTorch reads the program
    return predictor_of(target, file.program(), state)


def state_of(path: Path, details: dict[str, str]) -> State:
    """What a file says of its predictor."""
    if archive.SAVED not in details:
        raise InputError(
            f"{path} was written by export, so it holds what a predictor computes and not the predictor: write it with "
            "predictor.save, or use it with `propagauss predict`"
        )
    with _refused(path):
        return archive.read(details[archive.SAVED])


def predictor_of(path: Path, program: ExportedProgram, state: State) -> Predictor:
    with _refused(path):
        return _restored(_network(program, state), state)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except (Refused, PropagaussError, RecursionError) as error:
        raise InputError(
            f"{path} is refused, since what it says of its predictor is not as propagauss writes it "
            f"({str(error)[:200]}): save the predictor again with this version of propagauss"
        ) from error


def _network(program: ExportedProgram, state: State) -> Saved:
    """Behind the inputs that the file names, if these are the program's."""
    tensors = [slot for slot in state.slots if not slot.literal for _ in range(1 + slot.uncertain)]
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    types = [values[str(name)].dtype for name in program.graph_signature.user_inputs if str(name) in values]
    if [slot.sizes for slot in tensors] != sizes_of(program) or [slot.dtype for slot in tensors] != types:
        raise Refused("its inputs are not those of its program")
    spec = program.call_spec.out_spec
    results: Any = spec.unflatten(range(spec.num_leaves)) if spec is not None else None
    if not isinstance(results, dict) or not is_latent(set(results)):
        raise Refused("its program does not return a latent")
    divisible = all(slot.sizes and slot.sizes[0] is None for slot in tensors)
    with quiet():
        module = program.module(check_guards=False)
    return Saved(module, state.slots, state.form, state.plan, state.at_once if divisible else None)


def _restored(net: Saved, state: State) -> Predictor:
    if state.likelihood not in LIKELIHOODS:
        known = ", ".join(LIKELIHOODS)
        raise Refused(f"there is no likelihood {state.likelihood[:60]!r} (there are {known})")
    kind = LIKELIHOODS[state.likelihood]
    names = {field.name for field in fields(cast(Any, kind))}
    if set(state.numbers) != names:
        raise Refused(f"likelihood='{state.likelihood}' has {', '.join(sorted(names)) or 'no numbers'}")
    try:
        likelihood = kind(**state.numbers)
        if state.predictor == Predictor.__name__:
            return Predictor(net, likelihood, state.scale)
        return of_likelihood(net, likelihood, state.scale)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Refused(f"the numbers of its likelihood do not fit ({str(error)[:100]})") from error


def of_likelihood(net: Any, likelihood: Likelihood, scale: float = 1.0) -> Predictor:
    """The predictor that goes with a likelihood; those of their own class take its numbers by name."""
    door = DOORS.get(likelihood.name)
    if door is None:
        return Predictor(net, likelihood, scale)
    taken = inspect.signature(door.__init__).parameters
    numbers = {f.name: getattr(likelihood, f.name) for f in fields(cast(Any, likelihood)) if f.name in taken}
    return door(net, scale=scale, **numbers)  # type: ignore[arg-type, call-arg]
