"""How the covariance of a Gaussian is stored: one file for each structure, one protocol for all of them.

A structure has no state. Its methods take the Gaussian and return the tensor that is stored for the result, so that a
`Gaussian` is a mean, that tensor and the structure that can read it.
"""

from propagauss.structures.diagonal import DIAGONAL
from propagauss.structures.full import FULL
from propagauss.structures.protocol import Structure, Value

STRUCTURES: dict[str, Structure] = {kind.name: kind for kind in (DIAGONAL, FULL)}

__all__ = ["DIAGONAL", "FULL", "STRUCTURES", "Structure", "Value"]
