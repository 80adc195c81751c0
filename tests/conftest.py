"""For all tests: what makes tracing quicker, and a fixture for networks that come from one trace.

Python's collector of cycles looks less often: tracing makes hundreds of thousands of small objects, and each look goes
through all that torch and sympy keep. PyTorch does not keep what ops do to symbolic sizes: making an entry takes about
as long as the op itself, and small models have few ops that come again.
"""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")  # read when torch is imported


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported by now stays
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="module")
def one_trace() -> Iterator[None]:
    """Networks of the same model and example, which differ in their posteriors or options, come from one trace."""
    from propagauss.tracing.once import traced_once

    with traced_once():
        yield
