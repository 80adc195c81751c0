"""For all tests: what makes tracing quicker, and a fixture for networks that come from one trace.

Python's collector of cycles looks less often: tracing makes hundreds of thousands of small objects, and each look goes
through all that torch and sympy keep. PyTorch does not keep what ops do to symbolic sizes: making an entry takes about
as long as the op itself, and small models have few ops that come again. And it reads the source of its 500 functions
for ONNX once, not for every file that it writes.
"""

import functools
import gc
import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")  # read when torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is not there is not looked for, again and again, elsewhere


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported by now stays
    gc.set_threshold(50_000, 20, 20)
    if "onnxscript" in sys.modules:
        from torch.onnx._internal._lazy_import import onnxscript_apis as functions

        functions.get_torchlib_ops = functools.cache(functions.get_torchlib_ops)  # a list that is only read


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest collects twice before it ends, and looks for warnings from what is found


@pytest.fixture(scope="module")
def one_trace() -> Iterator[None]:
    """Networks of the same model and example, which differ in their posteriors or options, come from one trace."""
    from propagauss.tracing.once import traced_once

    with traced_once():
        yield
