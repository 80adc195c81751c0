"""For all tests: one seed, what makes tracing quicker, and a fixture for networks that come from one trace.

Python's collector of cycles looks less often: tracing makes hundreds of thousands of small objects, and each look goes
through all that torch and sympy keep. PyTorch does not keep what ops do to symbolic sizes: making an entry takes about
as long as the op itself, and small models have few ops that come again. And its tables of ops are made once, not for
every program that is decomposed and every file that is written.
"""

import functools
import gc
import os
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")  # read when torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is not there is not looked for, again and again, elsewhere


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported by now stays
    gc.set_threshold(50_000, 20, 20)
    if "torch.export" in sys.modules:
        _tables_of_decompositions()
        _bounds_of_sizes()
    if "onnxscript" in sys.modules:
        _tables_for_onnx()


def _tables_of_decompositions() -> None:
    import torch._export.utils as utils
    import torch._ops

    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)  # puts C++ ops into `torch.ops`
    torch._ops.Callable = typing.Callable  # in annotations that are read for every op; Python keeps what these make


def _bounds_of_sizes() -> None:
    """Nearly every program has the same one, `2 <= batch`, which takes sympy as long as a few ops take to be traced."""
    from sympy.solvers import inequalities

    solved = functools.lru_cache(4096)(inequalities.reduce_inequalities)
    inequalities.reduce_inequalities = lambda given, symbol: solved(frozenset(given), symbol)


def _tables_for_onnx() -> None:
    """All of them are only read: the one function that would change them, for ops of users, is never called here."""
    from torch.onnx._internal._lazy_import import onnxscript_apis as functions
    from torch.onnx._internal.exporter import _decomp as tables
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    functions.get_torchlib_ops = functools.cache(functions.get_torchlib_ops)
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    made = functools.cache(tables.create_onnx_friendly_decomposition_table)

    def table(ops: Any) -> Any:
        return made(frozenset(ops))

    tables.create_onnx_friendly_decomposition_table = table


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest collects twice before it ends, and looks for warnings from what is found


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers whichever tests came before it in its process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module")
def one_trace() -> Iterator[None]:
    """Networks of the same model and example, which differ in their posteriors or options, come from one trace."""
    from propagauss.tracing.once import traced_once

    with traced_once():
        yield
