"""One thread at a time, for what PyTorch and Python do by changing what all threads share.

While `torch.export` traces a model, and while a model is called with other values for its parameters, the parameters of
the very module are exchanged; filters of warnings and levels of logs belong to the whole process. Predictions do none
of this and need no lock.
"""

from __future__ import annotations

import importlib
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ALONE = threading.RLock()


@contextmanager
def quiet(message: str = "") -> Iterator[None]:
    """Alone, and without warnings that begin with `message`, nor PyTorch's logs if that is empty: errors say it all."""
    with ALONE, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        logger = logging.getLogger("torch")
        level = logger.level
        if not message:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def levels_kept() -> Iterator[None]:
    """Levels of torch.vmap and torch.func that ops of a traced model begin are ended, whatever happens in between."""
    levels: Any = importlib.import_module("torch._C._functorch")
    depth = levels.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if levels.get_dynamic_layer_stack_depth() > depth:
            levels.pop_dynamic_layer_stack_and_undo_to_depth(depth)
