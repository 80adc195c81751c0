"""Modules that cannot be pickled, and say what to do instead; they can still be copied."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

from propagauss.errors import InputError


class Unpickled:
    """Generated code is not in a pickle, which would load without an error and compute something else, or fail."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            f"a {type(self).__name__} cannot be pickled, so neither torch.save nor another process can take it: write "
            "a predictor with predictor.save('p.pt2') and read it with pg.load('p.pt2'), which needs no class of the "
            "model; state_dict() can be saved as usual"
        )

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new
