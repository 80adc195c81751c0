"""The errors that propagauss raises: each says what is wrong, where, and what to do about it."""

import difflib
from collections.abc import Iterable


class PropagaussError(ValueError):
    """Base of every error raised on purpose; anything else is a bug of ours."""


class PosteriorError(PropagaussError):
    """A posterior that is malformed, or that does not fit the model."""


class UnsupportedOpError(PropagaussError):
    """The model holds operations on uncertain values for which no rule is registered."""


class InputError(PropagaussError):
    """A model, an example or a call argument that cannot be used."""


def kept_norm(name: str) -> str:
    """Why a table of embeddings cannot be random, if it is made with `max_norm`."""
    layer = name.rpartition(".")[0] or "the layer"
    return (
        f"'{name}' cannot be random, since max_norm= shortens its rows in place whenever they are read; when it is "
        f"trained, read all rows once, {layer}(torch.arange({layer}.num_embeddings)), and set {layer}.max_norm = None, "
        "or leave it out of the random parameters"
    )


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest candidate, or an empty string."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
