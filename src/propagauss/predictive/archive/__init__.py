"""A torch.export archive (`.pt2`) written and read such that no file can run code: `write` and `load`.

`described` and `read` are for what a predictor needs beside its program, under the name `SAVED` of the details.
"""

from propagauss.predictive.archive.files import Loaded, load, opened, write
from propagauss.predictive.archive.refused import Refused
from propagauss.predictive.archive.state import State, described, read

SAVED = "predictor_state"

__all__ = ["SAVED", "Loaded", "Refused", "State", "described", "load", "opened", "read", "write"]
